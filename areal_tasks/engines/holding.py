"""One inference server with a client of its own, while the others of its pool continue with newer weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.handover import WeightsSource, name_of
from areal_tasks.engines.server import Server
from areal_tasks.engines.servers import Servers
from schemas.manifest import WeightsRef


@contextmanager
def held_server(servers: Servers, ref: WeightsRef) -> Iterator[InferenceClient]:
    """Inside, a client of one server, which has `ref` and generates for it alone. Others go on with newer weights.

    The store has `ref`. ServerDown: this server has ended, which closes the client, or all others lack weights that
    only the trainer has and is not sending.
    """
    pool, source = servers.inference(waits=False), WeightsSource(servers.run.store, servers.weights.reads_store)
    server, current = servers.call(pool.hold(name_of(ref)), generates=pool)
    patience = servers.patience_seconds
    own = servers.new_client(pool.settings.request_timeout_seconds if patience is None else patience)
    with ExitStack() as stack:
        stack.callback(_release, servers, pool, server, own)
        stack.callback(source.fetched.close)
        version, name, where = source.target(ref)
        if not current:
            where = source.ready(ref)
        servers.loop.run(own.holding(version, name, where))
        servers.loop.run(own.sync({server.url: server.start}, [server.url] if current else []))
        servers.holder = own
        servers.call(own.wait_healthy())
        yield own


def _release(servers: Servers, pool: InferenceClient, server: Server, own: InferenceClient) -> None:
    servers.holder = None
    servers.loop.run(own.close())
    servers.ask_workers(pool.release(server))
