"""What the rollout stages of a run share: which groups are settled, and those under way for coming iterations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from areal_tasks.data.sampler import position, row_of_group
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.session import Engines
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.book import Book
from areal_tasks.rollout.filters import kind_of, load_function
from areal_tasks.rollout.judging import Judge, judged_with
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import settled_after
from areal_tasks.rollout.spooling import Place, Spool, tables_of
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.stages.build import Built
from areal_tasks.stages.context import Context
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Output
from areal_tasks.stages.verify import check_failures
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.keys import digest_json, recipe_values
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Prompt, WorkflowContext, load_workflow
from schemas.errors import UserError
from schemas.manifest import IterationCommit, RejectedGroup, StageManifest
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe
from schemas.recipe.sections import Evaluation, Rollout

log = logging.getLogger(__name__)

ENGINE_FIELDS: Final = (
    *("model.dtype", "model.max_length", "inference.engine", "inference.flags"),
    *("inference.deterministic", "inference.slots"),
)
#: What decides what a group contains: not how many groups there are, nor how old one may be.
GROUP_FIELDS: Final = (
    *("rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "rollout.stop"),
    *("workflow", *ENGINE_FIELDS),
)


class Generation:
    """The groups of one start of a run's flow, from the iteration after `head` to the `last`.

    It generates nothing before the first `take`, and may go on until `close`.
    """

    def __init__(self, run: Run, head: IterationCommit | None, last: int, recipe_at: Callable[[int], Recipe]) -> None:
        self._run = run
        self._recipe_at = recipe_at
        self._last = last
        self._first = head.iteration + 1 if head else 0
        self.book = Book(self._rule(self._first), self._first, settled_after(head))
        self._spooled = spooled_after(head) if head and head.run == run.name else (0, 0)  # a child has its own spool
        self._held = threading.Event()
        self._recipe: Recipe | None = None
        self._rollouts: Rollouts | None = None
        self._engines: Engines | None = None

    def take(self, context: Context, inputs: Inputs) -> Output:
        """The samples that the iteration trains on, with their verdicts where there are filters.

        The metrics count the groups that were rejected meanwhile.

        Raises:
            UserError: the servers hold other weights than those the iteration begins with, too many verdicts are no
                judgement, or see `Rollouts.take`.
        """
        eta = self.book.rule.eta
        check_versions(context.engines.servers.inference(waits=eta == 0), context.weights.version, eta)
        rollouts = self._following(context, inputs)
        wanted, size = self.book.rule.batch(context.iteration), rollouts.context.group_size

        def count() -> tuple[int, int]:
            return min(self.book.ready(), wanted) * size, wanted * size

        with reported(f"rollout {context.iteration}", "samples", count):
            while True:
                taken = context.engines.servers.call(rollouts.take(), generates=True)
                check_verdicts(rollouts.judge, context.recipe)
                try:
                    return Output(tables_of_groups(rollouts, taken), rollouts.rejections.tell())
                except Unavailable:
                    raise
                except StoreError as error:
                    lost = [group for group in taken if group not in rollouts.finished]
                    log.warning("groups %s begin again, since the spool is damaged: %s", lost, error)
                    context.engines.servers.call(_in_loop(partial(rollouts.drop, lost)))

    def consume(self, context: Context, rollout: Built) -> None:
        """The iteration's rollout is committed: its groups are settled, whoever generated them."""
        taken, rollouts = groups_of(context.store, rollout.manifest), self._rollouts
        if rollouts is None:
            self.book.consume(taken)
        else:
            context.engines.servers.call(_in_loop(partial(rollouts.consume, taken)))

    def hold(self, held: bool) -> None:
        """Begin no group but those that a stage at work takes, until told otherwise; record what has finished.

        May be called from any thread. Does not wait long for the store, which may take the groups later.
        """
        (self._held.set if held else self._held.clear)()
        if self._rollouts is None or self._engines is None:
            return
        try:
            self._engines.servers.call_briefly(self._rollouts.flush() if held else _in_loop(self._rollouts.begin))
        except (UserError, TimeoutError) as error:
            log.warning("finished groups are not in the store yet: %s", str(error) or type(error).__name__)

    def close(self) -> None:
        """Give up the groups under way; those that wait are in the store then."""
        if self._rollouts is None or self._engines is None:
            return
        try:
            self._engines.servers.call_briefly(self._rollouts.close())
        except Exception as error:  # the run ends for another reason, which says more
            log.warning("finished groups were lost, and begin again: %s", str(error) or type(error).__name__)

    def state(self) -> dict[str, Any]:
        """What a commit says of the groups after its iteration: which are settled, where in the spool others wait."""
        settled, place = self.book.settled, self._spooled
        if self._rollouts is not None and self._engines is not None:
            settled, place = self._engines.servers.call(self._rollouts.settled())
        beyond = {"settled": sorted(settled.beyond)} if settled.beyond else {}
        spooled = {"spool": list(place)} if place != (0, 0) else {}
        return {"next_group": settled.prefix} | beyond | spooled

    def _following(self, context: Context, inputs: Inputs) -> Rollouts:
        """The groups under way; none of them where they were begun by another recipe, which a replay may have."""
        if self._rollouts is None or self._recipe != context.recipe:
            self.close()
            self._recipe, self._engines = context.recipe, context.engines
            self._rollouts = self._new(context, inputs)
        return self._rollouts

    def _new(self, context: Context, inputs: Inputs) -> Rollouts:
        recipe, prompts = context.recipe, inputs.read(context, "prompts")
        assert isinstance(recipe, RlhfRecipe)
        self.book.live.clear()
        self.book.rule, self.book.pace = self._rule(context.iteration), recipe.rollout.pace
        spool, rejected = self._recovered(recipe, inputs)
        rollouts = Rollouts(
            book=self.book,
            workflow=load_workflow(recipe.workflow.name, recipe.workflow.arguments),
            context=workflow_context(context, recipe.rollout, recipe.rollout.group_size),
            prompt_of=lambda group: prompt_of_group(prompts, group, recipe.seed, self._run.record.order),
            limits=recipe.rollout,
            spool=spool,
            judge=judge_of(context, recipe) if recipe.rollout.filters.active else None,
            held=self._held,
        )
        if context.iteration == self._first:  # else an iteration may have told of them, whose rollout was reused
            rollouts.rejections.counts.update(kind_of(group.reason) for group in rejected)
        return rollouts

    def _recovered(self, recipe: RlhfRecipe, inputs: Inputs) -> tuple[Spool, list[RejectedGroup]]:
        """The spool, with what earlier starts of the flow have left there in the book; and what they have rejected."""
        spool = Spool(self._run, made_with(recipe, inputs.ref("prompts").digest), self._spooled)
        waiting, rejected = spool.recover(self.book.settled)
        for group in rejected:
            self.book.reject(group.index)
        kept = self.book.restore(waiting)
        spool.forget({group.index for group in waiting} - {group.index for group in kept})
        if waiting:
            log.info("%d groups that had finished are in the store; %d of them can be used", len(waiting), len(kept))
        return spool, rejected

    def _rule(self, k: int) -> Staleness:
        rollout = self._recipe_at(k).rollout  # type: ignore[union-attr]
        return Staleness(rollout.max_head_offpolicyness, self._last, self._batch, rollout.bound)

    def _batch(self, k: int) -> int:
        return self._recipe_at(k).rollout.groups  # type: ignore[union-attr]


async def _in_loop(action: Callable[[], None]) -> None:
    action()


def tables_of_groups(rollouts: Rollouts, groups: Sequence[int]) -> dict[str, pa.Table]:
    """The tables of these groups, in order of group and sample: `rollout`, and `judged` where there are filters."""
    held = [group for group in groups if group in rollouts.finished]
    there = tables_of([sample for group in held for sample in rollouts.finished[group]])
    if len(held) == len(groups):
        return there
    spooled, names = set(groups) - set(held), ["rollout", *(["judged"] if rollouts.judge else [])]
    parts = {name: [*([there[name]] if held else []), rollouts.spool.read(spooled, name)] for name in names}
    order = [("group_id", "ascending"), ("sample_index", "ascending")]
    return {name: pa.concat_tables(tables).sort_by(order) for name, tables in parts.items()}


def judge_of(context: Context, recipe: RlhfRecipe) -> Judge:
    """What looks at finished groups for the recipe's filters."""
    pool, filters = context.engines.verifiers, recipe.rollout.filters

    def verify(rows: Sequence[Row]) -> list[VerifyResult]:
        with context.engines.judging(len(rows)):
            return pool.verify(rows)

    return Judge(verify, judged_with(recipe), filters, load_function(filters), recipe.rollout.group_seconds)


def check_verdicts(judge: Judge | None, recipe: Recipe) -> None:
    """UserError if too many of the verdicts since the last iteration are no judgement, rejected groups included."""
    if judge is not None and judge.results:
        check_failures(judge.results, recipe.reward)  # type: ignore[union-attr]
        judge.results.clear()


def made_with(recipe: RlhfRecipe, prompts: str) -> str:
    """Digest of what decides what a group contains, besides the weights; `prompts`: that of the table.

    With filters, also of what decides whether it is rejected.
    """
    filtered = (
        [recipe_values(recipe, ["rollout.filters"]), judged_with(recipe)] if recipe.rollout.filters.active else []
    )
    return digest_json([recipe_values(recipe, GROUP_FIELDS), recipe.seed, prompts, *filtered])


def spooled_after(head: IterationCommit) -> Place:
    """The first record of the spool that may speak of a group that is not settled after a commit."""
    start, n = head.state.get("spool", (0, 0))
    return int(start), int(n)


def groups_of(store: Store, rollout: StageManifest) -> list[int]:
    """The numbers of the groups in a rollout's table."""
    table = read_table(store, rollout.tables["rollout"], ["group_id"])
    return sorted(pc.unique(table["group_id"]).to_pylist())


def prompt_of_group(table: pa.Table, group: int, seed: int, order: int) -> Prompt:
    """The prompt of a group: a pure function of the run's seed and order, and the group's number."""
    [row] = table.slice(row_of_group(group, len(table), seed, order), 1).to_pylist()
    return Prompt(group_id=group, epoch=position(group, len(table))[0], **row)


def workflow_context(context: Context, sampling: Rollout | Evaluation, group_size: int) -> WorkflowContext:
    """What the recipe's workflow is given to produce groups of `group_size` samples."""
    recipe = context.recipe
    assert isinstance(recipe, (RlhfRecipe, EvaluateRecipe))
    return WorkflowContext(
        client=context.engines.servers.inference(),
        seed=recipe.seed,
        group_size=group_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        max_length=recipe.model.max_length,
        stop=tuple(sampling.stop),
        tokenizer=context.engines.tokenizer,
    )


def check_versions(client: InferenceClient, expected: int, lag: int = 0) -> None:
    """Raises UserError if the servers hold other weights than those this iteration is about, or `lag` older ones."""
    if client.version is not None and not expected - lag <= client.version <= expected:
        raise UserError(f"the servers hold version {client.version} of the weights, not {expected}")
