"""The process of a rollout worker: its state and operations, behind an HTTP API.

The method of `Worker` with the name of a request (`REQUESTS`) handles it. Errors are JSON, {"error": "..."}; the HTTP
status depends on their type (`areal_tasks.rollout.orders.STATUSES`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any, Final, cast

import psutil
from pydantic import BaseModel
from starlette.applications import Starlette

from areal_tasks.code_digests import VERIFIER, check_same_code, code_digests
from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.ends import Detokenizer, Ends
from areal_tasks.engines.lifeline import DUTIES
from areal_tasks.engines.models import describing_files, load_tokenizer
from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec, as_service, read_spec, routes_of, serve, status_in
from areal_tasks.engines.sharing import Serving
from areal_tasks.rewards.pool import VerifierPool, VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.filters import load_function
from areal_tasks.rollout.judging import Judge
from areal_tasks.rollout.made_with import judged_with
from areal_tasks.rollout.orders import (
    STATUSES,
    Begin,
    Begun,
    Busy,
    Down,
    Event,
    Known,
    LeaseOver,
    Leaving,
    News,
    Orders,
    Part,
    Written,
)  # fmt: skip
from areal_tasks.rollout.prompts import (
    PROMPT_COLUMNS,
    evaluation_rollout,
    held_out_prompts,
    prompt_of_group,
    workflow_context,
)
from areal_tasks.rollout.spooling import Writer
from areal_tasks.rollout.worker.apart import IsolatedWorkflow
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.store.backend import open_store
from areal_tasks.store.in_flight import LEDGER
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Prompt, SingleTurn, load_workflow
from schemas.manifest import WeightsRef
from schemas.recipe.derived import interruption, judges_groups, judges_in_advance
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe
from schemas.recipe.sections import Rollout

Generating = RlhfRecipe | EvaluateRecipe  # recipes that have groups generated
FAREWELL_SECONDS: Final = 60.0  # to write finished groups after the flow has ended
HEARTBEAT_SECONDS: Final = 1.0  # a long poll without events is answered after this time

#: The requests, and what the body of each is; None: it has none.
REQUESTS: Final[Mapping[str, type[BaseModel] | None]] = {
    "begin": Begin,
    "orders": Orders,
    "serving": Serving,
    "news": Known,
    "write": Part,
    **dict.fromkeys(("busy", "flush", "leave", "close", "end")),
}


def make_app(spec: ServiceSpec) -> Starlette:
    """The HTTP application of a worker that has no orders yet."""
    worker = Worker(spec)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        """While inside, the worker closes when its flow ends (`DUTIES`); else at the end."""
        loop = asyncio.get_running_loop()
        duty = lambda: asyncio.run_coroutine_threadsafe(worker.close(), loop).result(FAREWELL_SECONDS)  # noqa: E731
        DUTIES.append(duty)
        try:
            yield
        finally:
            DUTIES.remove(duty)
            await worker.close()

    handlers = {name: (getattr(worker, name), body) for name, body in REQUESTS.items()}
    return Starlette(routes=routes_of(handlers, partial(status_in, STATUSES)), lifespan=lifespan)


def main() -> None:
    """Serve until asked to end."""
    with suppress(OSError):  # if memory runs out, Linux then ends users' code rather than a trainer or the flow
        Path("/proc/self/oom_score_adj").write_text("500")
    with as_service():
        spec = read_spec()
        serve(make_app(spec), spec)


class Worker:
    """The worker of one service. Use within one event loop; `close()` when done."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._spec = spec
        self._store = open_store(spec.store_url)
        self._client: InferenceClient | None = None
        self._groups: Groups | None = None
        self._resources = AsyncExitStack()  # of the groups
        self._events: list[Event] = []  # that the flow may not have received
        self._known = 0  # number of events that the flow has received
        self._news = asyncio.Event()
        self._beginning = asyncio.Lock()

    async def begin(self, order: Begin) -> Begun:
        """Prepare to generate groups with these settings, and forget earlier groups."""
        async with self._beginning:
            await self.close()
            self._events, self._known = [], 0
            recipe = (EvaluateRecipe if order.recipe["flow"] == "evaluate" else RlhfRecipe).model_validate(order.recipe)
            sampling = evaluation_rollout(recipe) if order.evaluates else cast(RlhfRecipe, recipe).rollout
            with suppress(FileNotFoundError):  # on another machine; importing code from that folder then fails
                os.chdir(order.folder)
            workflow = load_workflow(recipe.workflow.name, recipe.workflow.arguments)
            here = {field: digest for field, digest in order.code.items() if field != VERIFIER}  # which checks itself
            check_same_code(here, code_digests(order.recipe), f"of the rollout worker on {gethostname()}")
            prompts = await asyncio.to_thread(read_table, self._store, order.prompts, PROMPT_COLUMNS)
            prompt_of: Callable[[int], Prompt] = partial(prompt_of_group, prompts, seed=recipe.seed, order=order.order)
            if order.evaluates:
                prompt_of = held_out_prompts(prompts).__getitem__
            tokenizer = None
            if not isinstance(workflow, SingleTurn):  # which never blocks, and needs no tokenizer
                tokenizer = await asyncio.to_thread(self._tokenizer, order.model)
                workflow = IsolatedWorkflow(workflow, recipe.workflow.blocked_seconds)
            self._client = await self._new_client(order, recipe, tokenizer)
            decides = judges_groups(recipe, sampling)
            judges = decides or (not order.evaluates and judges_in_advance(cast(RlhfRecipe, recipe)))
            judge = self._judge(recipe, sampling, decides, order.code) if judges else None
            if isinstance(workflow, IsolatedWorkflow):
                self._resources.callback(workflow.close)
            writer = Writer(self._store, self._spec.run, self._spec.owner, order.made_with)
            # opened before there are groups, so that the flow can close it, and find them, whenever this process ends
            start = None if order.evaluates else await asyncio.to_thread(writer.open)
            self._groups = Groups(
                workflow,
                workflow_context(recipe, sampling, self._client, tokenizer),
                prompt_of,
                sampling,
                writer,
                self.report,
                judge,
                spools=not order.evaluates,
            )
            return Begun(start=start)

    async def _new_client(self, order: Begin, recipe: Generating, tokenizer: Any) -> InferenceClient:
        ends = Ends(frozenset(order.end_tokens), await asyncio.to_thread(self._detokenizer, order, tokenizer))
        client = InferenceClient(
            [],
            Access(order.server_token, order.server_authority),
            recipe.inference,
            order.patience_seconds,
            lambda: ends,
            interruption(recipe),
        )
        self._resources.push_async_callback(client.close)
        client.report = lambda url, reason: self.report(Down(url=url, reason=reason))
        await client.follow(order.serving)
        return client

    def _judge(self, recipe: Generating, sampling: Rollout, decides: bool, code: Mapping[str, str]) -> Judge:
        """Verifies samples for the recipe's filters and its workflow, or in advance."""
        pool, filters = VerifierPool(recipe.reward, code), sampling.filters
        pool.submit(())  # so that its processes start while the first groups are generated
        self._resources.push_async_callback(asyncio.to_thread, pool.close)

        def verify(rows: Sequence[Row]) -> asyncio.Future[list[VerifyResult]]:
            return asyncio.wrap_future(pool.submit(rows))

        function, made_with = load_function(filters), judged_with(recipe, code)
        return Judge(verify, made_with, filters, function, sampling.group_seconds, decides)

    def _detokenizer(self, order: Begin, tokenizer: Any) -> Detokenizer:
        if tokenizer is None and order.tokenizer:  # avoids the import of transformers
            from tokenizers import Tokenizer

            return Detokenizer(SimpleNamespace(backend_tokenizer=Tokenizer.from_str(order.tokenizer)))
        return Detokenizer(tokenizer or self._tokenizer(order.model))

    def _tokenizer(self, model: WeightsRef) -> Any:
        with tempfile.TemporaryDirectory(prefix="arealflow-worker-") as folder:
            return load_tokenizer(describing_files(self._store, model, Path(folder) / "model"))

    def report(self, event: Event) -> None:
        """Have the flow receive this event."""
        self._events.append(event)
        self._news.set()

    async def news(self, after: Known) -> News:
        """The events after those that are known; waits `HEARTBEAT_SECONDS` for one if there are none."""
        self._check_memory(self._begun())
        del self._events[: after.known - self._known]
        self._known = after.known
        self._news.clear()
        if not self._events:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_SECONDS)
        return News(events=tuple(self._events))

    def _check_memory(self, groups: Groups) -> None:
        limit = groups.limits.worker_memory_mb
        if limit and not groups.leaving and psutil.Process().memory_info().rss > limit * 1e6:
            groups.leave()
            self.report(Leaving())

    async def orders(self, orders: Orders) -> None:
        """Begin the groups of new leases, and drop those whose leases are over."""
        self._begun().apply(orders)

    async def serving(self, serving: Serving) -> None:
        """Generate on these servers only, from now on."""
        self._begun()
        assert self._client is not None
        await self._client.follow(serving)

    async def busy(self) -> Busy:
        """The worker's requests in flight, and what the store keeps it waiting for.

        The process ends if that does not answer for `launcher.store_seconds`: an iteration may wait for it.
        """
        LEDGER.end_if_hangs(self._spec.recipe["launcher"]["store_seconds"], UNAVAILABLE)
        servers = self._client.servers if self._client is not None else []
        waits = [one.describe() for one in LEDGER.in_flight()[:1]]
        if self._groups is not None and self._groups.unwritten:
            waits.append(f"finished groups cannot be written: {self._groups.unwritten}")
        requests = {server.url: server.requests for server in servers if server.requests}
        return Busy(requests=requests, store="; ".join(waits))

    async def write(self, part: Part) -> Written:
        """Write a part of an iteration."""
        return await self._begun().write(part)

    async def flush(self) -> None:
        """Write finished groups to the store."""
        await self._begun().flush()

    async def leave(self) -> None:
        """Write finished groups to the store at once from now on."""
        self._begun().leave()

    async def end(self) -> None:
        """End the process."""
        os.kill(os.getpid(), signal.SIGTERM)

    async def close(self) -> None:
        """Abandon running groups, write finished ones to the store, and disconnect from the servers."""
        self._news.set()  # answers a pending long poll, without which the process cannot end
        if self._groups is not None:
            await self._groups.close()
        self._groups = None
        await self._resources.aclose()
        self._client = None

    def _begun(self) -> Groups:
        if self._groups is None:
            raise LeaseOver("this worker has no orders yet")
        return self._groups
