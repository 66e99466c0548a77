"""The state and operations of a rollout worker, behind the HTTP API of `process`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.ends import Detokenizer, Ends
from areal_tasks.engines.models import describing_files, load_tokenizer
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.sharing import Serving
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.rollout.filters import load_function
from areal_tasks.rollout.judging import Judge, judged_with
from areal_tasks.rollout.orders import Begin, Down, Event, LeaseOver, Leaving, News, Orders, Part, Written
from areal_tasks.rollout.prompts import PROMPT_COLUMNS, prompt_of_group, workflow_context
from areal_tasks.rollout.spooling import Writer
from areal_tasks.rollout.worker.apart import IsolatedWorkflow
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.store.backend import open_store
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import SingleTurn, load_workflow
from schemas.manifest import WeightsRef
from schemas.recipe.derived import interruption, judges_groups
from schemas.recipe.recipe import RlhfRecipe

HEARTBEAT_SECONDS: Final = 1.0  # without events, after which a long poll is answered


class WorkerService:
    """The worker of one service. Use within one event loop; `close()` when done."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._spec = spec
        self._store = open_store(spec.store_url)
        self._client: InferenceClient | None = None
        self._groups: Groups | None = None
        self._isolated: IsolatedWorkflow | None = None
        self._verifiers: VerifierPool | None = None
        self._events: list[Event] = []  # that the flow may not have received
        self._known = 0  # number of events that the flow has received
        self._news = asyncio.Event()
        self._beginning = asyncio.Lock()

    async def begin(self, order: Begin) -> None:
        """Be ready to generate groups with these settings, and forget earlier groups."""
        async with self._beginning:
            await self.close()
            self._events, self._known = [], 0
            recipe = RlhfRecipe.model_validate(order.recipe)
            with suppress(FileNotFoundError):  # on another machine; code that is needed from there is then missed
                os.chdir(order.folder)
            workflow = load_workflow(recipe.workflow.name, recipe.workflow.arguments)
            prompts = await asyncio.to_thread(read_table, self._store, order.prompts, PROMPT_COLUMNS)
            tokenizer = None
            if not isinstance(workflow, SingleTurn):  # which never blocks, and needs no tokenizer
                tokenizer = await asyncio.to_thread(self._tokenizer, order.model)
                workflow = self._isolated = IsolatedWorkflow(workflow, recipe.workflow.blocked_seconds)
            self._client = await self._new_client(order, recipe, tokenizer)
            self._groups = Groups(
                workflow,
                workflow_context(recipe, recipe.rollout, recipe.rollout.group_size, self._client, tokenizer),
                partial(prompt_of_group, prompts, seed=recipe.seed, order=order.order),
                recipe.rollout,
                Writer(self._store, self._spec.run, self._spec.owner, order.made_with),
                self.report,
                self._judge(recipe) if judges_groups(recipe) else None,
            )

    async def _new_client(self, order: Begin, recipe: RlhfRecipe, tokenizer: Any) -> InferenceClient:
        ends = Ends(frozenset(order.end_tokens), await asyncio.to_thread(self._detokenizer, order, tokenizer))
        client = InferenceClient(
            [],
            Access(order.server_token, order.server_authority),
            recipe.inference,
            order.patience_seconds,
            lambda: ends,
            interruption(recipe),
        )
        client.report = lambda url, reason: self.report(Down(url=url, reason=reason))
        await client.follow(order.serving)
        return client

    def _judge(self, recipe: RlhfRecipe) -> Judge:
        """Verifies samples for the recipe's filters and its workflow."""
        self._verifiers = VerifierPool(recipe.reward)
        filters = recipe.rollout.filters
        return Judge(
            self._verifiers.verify, judged_with(recipe), filters, load_function(filters), recipe.rollout.group_seconds
        )

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

    async def news(self, known: int) -> News:
        """The events after the first `known`; waits `HEARTBEAT_SECONDS` for one if there are none."""
        self._check_memory(self._begun())
        del self._events[: known - self._known]
        self._known = known
        self._news.clear()
        if not self._events:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_SECONDS)
        return News(events=tuple(self._events))

    def _check_memory(self, groups: Groups) -> None:
        limit = groups.limits.worker_memory_mb
        if 0 < limit < resident_mb() and not groups.leaving:
            groups.leave()
            self.report(Leaving())

    def apply(self, orders: Orders) -> None:
        """Begin the groups of new leases, and drop those whose leases are over."""
        self._begun().apply(orders)

    async def follow(self, serving: Serving) -> None:
        """From now on generate on these servers only."""
        self._begun()
        assert self._client is not None
        await self._client.follow(serving)

    def busy(self) -> dict[str, int]:
        """Requests in flight, by server address."""
        servers = self._client.servers if self._client is not None else []
        return dict(Counter({server.url: server.requests for server in servers if server.requests}))

    async def write(self, part: Part) -> Written:
        """Write a part of an iteration."""
        return await self._begun().write(part)

    async def flush(self) -> None:
        """Write finished groups to the store."""
        await self._begun().flush()

    def leave(self) -> None:
        """Write finished groups to the store at once from now on."""
        self._begun().leave()

    async def close(self) -> None:
        """Abandon running groups, write finished ones to the store, and disconnect from the servers."""
        self._news.set()  # answers a pending long poll, without which the process cannot end
        if self._groups is not None:
            await self._groups.close()
            self._groups = None
        if self._isolated is not None:
            self._isolated.close()
            self._isolated = None
        if self._verifiers is not None:
            await asyncio.to_thread(self._verifiers.close)
            self._verifiers = None
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _begun(self) -> Groups:
        if self._groups is None:
            raise LeaseOver("this worker has no orders yet")
        return self._groups


def resident_mb() -> float:
    """This process's memory in MB; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
