"""One inference server with a client of its own, while the others of its pool continue with newer weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.handover import WeightsSource, name_of
from areal_tasks.engines.loop_thread import Call
from areal_tasks.engines.server import Server
from schemas.manifest import WeightsRef


class Holder:
    """`client`: that of the held server. `run` runs a client's coroutines; `call` also supervises the servers.

    `hold`: `InferenceClient.hold` of a pool, run by `call`, which ends it if the pool is `stuck`.
    """

    def __init__(self, run: Call, call: Call, hold: Callable[[InferenceClient, str], tuple[Server, bool]]) -> None:
        self.client: InferenceClient | None = None
        self._run = run
        self._call = call
        self._hold = hold

    @contextmanager
    def held(
        self, pool: InferenceClient, ref: WeightsRef, source: WeightsSource, own: InferenceClient
    ) -> Iterator[InferenceClient]:
        """Inside, the client `own` has a server of `pool` for itself, with `ref`. Afterwards `own` is closed.

        Raises:
            ServerDown: this server has ended, or all others lack weights that only the trainer has and is not sending.
        """
        server, current = self._hold(pool, name_of(ref))
        with ExitStack() as stack:
            stack.callback(self._end, pool, server, own)
            stack.callback(source.fetched.close)
            version, name, where = source.target(ref)
            if not current:
                where = stack.enter_context(source.opened(ref))
            self._run(own.holding(version, name, where))
            self._run(own.sync({server.url: server.start}, [server.url] if current else []))
            self.client = own
            self._call(own.wait_healthy())
            yield own

    def _end(self, pool: InferenceClient, server: Server, own: InferenceClient) -> None:
        self.client = None
        self._run(own.close())
        self._run(pool.release(server))

    def keep_to(self, running: Set[tuple[str, int]]) -> None:
        """Close the client of a server that has ended, before another start of it gets other weights."""
        if (own := self.client) is not None and any((one.url, one.start) not in running for one in own.servers):
            self._run(own.close())
