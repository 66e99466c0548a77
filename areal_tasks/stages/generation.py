"""rollout: the iteration's prompts, and `group_size` completions of each, sampled by the inference servers.

The rollout stages of a run share their groups: settled ones, and those in progress for coming iterations.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.loop_thread import BRIEF_SECONDS
from areal_tasks.engines.servers import Servers
from areal_tasks.rewards.load import verifier_version
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.losses import recover
from areal_tasks.rollout.made_with import ENGINE_FIELDS, made_with
from areal_tasks.rollout.orders import Begin
from areal_tasks.rollout.prompts import PROMPT_COLUMNS
from areal_tasks.rollout.rejections import stale_reason
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import settled_after
from areal_tasks.rollout.spooling import NOTHING_SPOOLED, Place, Spool
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from areal_tasks.stages.verify import check_failures
from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import content_digest, read_table
from schemas.errors import UserError
from schemas.manifest import IterationCommit, StageManifest, TableRef
from schemas.recipe.derived import judges_groups
from schemas.recipe.recipe import Recipe, RlhfRecipe
from schemas.recipe.sections import Rollout as RolloutSettings

log = logging.getLogger(__name__)


def rollout(recipe: RlhfRecipe) -> Stage:
    """One row per completion: its tokens, their log-probabilities and the weights version of each.

    With filters, or a workflow that asks for verdicts, these determine which groups there are or what they contain. So
    they are written too, and the key covers their settings.
    """
    judged, ahead = judges_groups(recipe, recipe.rollout), recipe.rollout.max_head_offpolicyness > 0
    return Stage(
        name="rollout",
        kind=Kind.GENERATE,
        version=1 + (100 * verifier_version(recipe.reward.verifier) if judged else 0),
        run=run,
        reads=columns("prompts", *PROMPT_COLUMNS),
        writes=("rollout", "judged") if judged else ("rollout",),
        fields=("rollout", "workflow", *ENGINE_FIELDS, *(("reward",) if judged else ())),
        carries=() if ahead else ("weights",),  # ahead, samples have several versions
        source=True,
        ahead=ahead,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    assert context.generation is not None, "the loop makes it"
    return context.generation.take(context, inputs, prefix)


class Generation:
    """The groups of one start of a run's flow, from the iteration after `head` to the `last`.

    Nothing is generated before the first `take` or after `close`.
    """

    def __init__(
        self, run: Run, head: IterationCommit | None, last: int, recipe_at: Callable[[int], Recipe], servers: Servers
    ) -> None:
        self._run = run
        self._servers = servers
        self._recipe_at = recipe_at
        self._last = last
        self._first = head.iteration + 1 if head else 0
        self.tracker = GroupTracker(self._rule(self._first), self._first, settled_after(head))
        # a derived run has a spool of its own
        self._spooled = spooled_after(head) if head and head.run == run.name else NOTHING_SPOOLED
        self._held = threading.Event()
        self._recipe: Recipe | None = None
        self._made_with = ""  # the groups in progress
        self._rollouts: Rollouts | None = None

    def take(self, context: Context, inputs: Inputs, prefix: str) -> Output:
        """The samples that the iteration trains on, with their verdicts if groups are judged.

        The workers write them below `prefix`. The metrics include the groups rejected since the last iteration.

        Raises UserError: the servers hold other weights than the iteration begins with, or too many samples could not
        be verified. Other errors as of `Rollouts.take`.
        """
        eta = self.tracker.rule.eta(context.iteration)
        lag = context.iteration if eta else 0  # if they lag, the rule does not let groups begin that would be too old
        check_versions(self._servers.inference(waits=eta == 0), context.iteration, lag)
        rollouts = self._following(context, inputs)
        wanted, size = self.tracker.rule.batch(context.iteration), rollouts.limits.group_size

        def count() -> tuple[int, int]:
            return min(self.tracker.ready(), wanted) * size, wanted * size

        with reported(f"rollout {context.iteration}", "samples", count):
            parts = self._servers.call(rollouts.take(prefix), generates=rollouts.client)
        recipe, judged = context.recipe, rollouts.judged
        assert isinstance(recipe, RlhfRecipe)
        if judges_groups(recipe, recipe.rollout):  # of rejected groups too; else the stage `verify` checks them
            check_failures([one for group in list(judged) for one in judged.pop(group).verdicts], recipe.reward)
        tables = {name: whole(context.store, [part.tables[name] for part in parts]) for name in parts[0].tables}
        sizes = sizes_of(sum(p.samples for p in parts), sum(p.tokens for p in parts), sum(p.truncated for p in parts))
        return Output(tables, sizes | rollouts.rejections.metrics())

    def verdicts(self, bases: Mapping[int, str]) -> dict[int, Sequence[VerifyResult]]:
        """The verdicts that workers made on that basis, for each of these groups, and did not write; each once."""
        judged = self._rollouts.judged if self._rollouts is not None else {}
        found = {group: judged.pop(group) for group in bases if group in judged}
        return {group: one.verdicts for group, one in found.items() if one.basis == bases[group]}

    def consume(self, taken: Sequence[int]) -> None:
        """Settle the groups `taken`: the iteration's rollout, which may be of an earlier start, is committed."""
        if self._rollouts is None:
            self.tracker.consume(taken)
        else:
            self._servers.call(in_loop(partial(self._rollouts.consume, taken)))

    def hold(self, held: bool) -> None:
        """While `held`, begin only groups that a running stage waits for; write finished ones to the store.

        May be called from any thread. Waits only briefly for the store: writes that fail are retried later.
        """
        (self._held.set if held else self._held.clear)()
        if self._rollouts is None:
            return
        try:
            self._servers.loop.run(self._rollouts.flush() if held else in_loop(self._rollouts.begin), BRIEF_SECONDS)
        except (UserError, TimeoutError) as error:
            log.warning("finished groups are not in the store yet: %s", str(error) or type(error).__name__)

    def close(self) -> None:
        """Abandon running groups, and write finished ones to the store."""
        if self._rollouts is not None:
            self._servers.workers.end(self._rollouts)

    def recipes_have_changed(self, first: int) -> None:
        """Apply the changed recipes of the iterations from `first` on. No iteration may be taking groups."""
        rule = self._rule(first)
        if self._rollouts is None:
            self.tracker.rule = rule
        else:
            self._servers.call(in_loop(partial(self._rollouts.change_rule, rule, no_room(first))))

    def state(self) -> dict[str, Any]:
        """The groups after an iteration, as its commit records them: settled ones, and the spool's places of others."""
        settled, places = self.tracker.settled, self._spooled
        if self._rollouts is not None:
            settled, places = self._servers.call(self._rollouts.settled())
        beyond = {"settled": sorted(settled.beyond)} if settled.beyond else {}
        spooled = {"spool": [list(place) for place in places]} if places != NOTHING_SPOOLED else {}
        return {"next_group": settled.prefix} | beyond | spooled

    def _following(self, context: Context, inputs: Inputs) -> Rollouts:
        """The groups in progress. Starts over if this iteration's settings make other groups, as in a replay."""
        recipe = context.recipe
        assert isinstance(recipe, RlhfRecipe)
        kind = made_with(recipe, inputs.ref("prompts").digest, context.engines.code)
        if self._rollouts is None or self._made_with != kind:
            self.close()
            self._made_with = kind
            self._rollouts = self._new(context, inputs)
            self._servers.workers.serve(self._rollouts)
        elif self._recipe != recipe:
            order = order_of(context, self._rollouts.client, inputs.ref("prompts"), kind)
            self._servers.call(in_loop(partial(self._rollouts.change_settings, recipe.rollout, order)))
        self._recipe = recipe
        return self._rollouts

    def _new(self, context: Context, inputs: Inputs) -> Rollouts:
        recipe, run = context.recipe, self._run
        assert isinstance(recipe, RlhfRecipe)
        self.tracker.rule, self.tracker.pace = self._rule(context.iteration), recipe.rollout.pace
        spool = Spool(run.store, run.name, run.owner, self._made_with, self._spooled)
        rejected, stale = recover(self.tracker, spool, no_room(context.iteration))
        client = self._servers.inference(waits=False)
        order = order_of(context, client, inputs.ref("prompts"), self._made_with)
        access, limits = context.engines.supervisor.access, recipe.rollout
        rollouts = Rollouts(self.tracker, client, order, lambda url, flow: Link(url, access, flow), limits, spool)
        rollouts.held = self._held
        # after the first iteration of this start: its rollout was reused, filled a batch and may have counted
        # them; those for which this iteration has no room it has not
        counted, here = context.iteration > self._first, stale_reason(no_room(context.iteration))
        uncounted = [group for group in rejected if not counted or group.reason == here]
        rollouts.rejections.restore(uncounted, self.tracker.ready())
        for group in stale:
            rollouts.rejections.add(group)
        return rollouts

    def _rule(self, k: int) -> Staleness:
        def eta(j: int) -> int:
            return self._settings(j).max_head_offpolicyness

        return Staleness(eta, self._last, lambda j: self._settings(j).groups, self._settings(k).bound)

    def _settings(self, k: int) -> RolloutSettings:
        return self._recipe_at(k).rollout  # type: ignore[union-attr]


def no_room(first: int) -> str:
    """Why finished groups are rejected as stale."""
    return f"too old or too many for what is in force from iteration {first} on"


async def in_loop(action: Callable[[], None]) -> None:
    action()


def order_of(
    context: Context, client: InferenceClient, prompts: TableRef, made_with: str, evaluates: bool = False
) -> Callable[[], Begin]:
    """Makes the first order for a rollout worker, which generates on the servers of `client`."""
    engines, recipe = context.engines, context.recipe
    detokenizer = engines.ends.detokenizer

    def order() -> Begin:
        """The first order with the servers that may generate now."""
        assert engines.initial is not None, "there are servers"
        return Begin(
            recipe=recipe.model_dump(mode="json"),
            evaluates=evaluates,
            folder=str(Path.cwd()),
            prompts=prompts,
            order=context.run.record.order,
            made_with=made_with,
            code=engines.code,
            model=engines.initial,
            end_tokens=tuple(sorted(engines.ends.tokens)),
            tokenizer=detokenizer.as_json if detokenizer else "",
            server_token=engines.servers.access.token,
            server_authority=engines.servers.access.authority,
            patience_seconds=engines.servers.patience_seconds,
            serving=client.serving,
        )

    return order


def whole(store: Store, parts: Sequence[TableRef]) -> TableRef:
    """The table that consists of these parts, in order. Computes its digest, except for a single part."""
    if len(parts) == 1:
        return parts[0]
    table = TableRef(name=parts[0].name, digest="", shards=tuple(shard for part in parts for shard in part.shards))
    return table.model_copy(update={"digest": content_digest(read_table(store, table))})


def sizes_of(samples: int, tokens: int, truncated: int) -> dict[str, float]:
    """Samples, generated tokens, their mean per sample, and the share of truncated samples."""
    return {
        "samples": float(samples),
        "tokens": float(tokens),
        "mean_tokens": tokens / max(samples, 1),
        "truncated": truncated / max(samples, 1),
    }


def spooled_after(head: IterationCommit) -> Sequence[Place]:
    """Where in the spool groups may be that are not settled after a commit; see `Spool.first`.

    Commits of earlier program versions, without rollout workers, name only one record: their starts were sequential.
    """
    places = head.state.get("spool", NOTHING_SPOOLED)
    pairs = places if isinstance(places[0], (list, tuple)) else [places]
    return [(int(start), int(n)) for start, n in pairs]


def groups_of(store: Store, rollout: StageManifest) -> list[int]:
    """The numbers of the groups in a rollout's table."""
    table = read_table(store, rollout.tables["rollout"], ["group_id"])
    return sorted(pc.unique(table["group_id"]).to_pylist())


def check_versions(client: InferenceClient, expected: int, lag: int = 0) -> None:
    """UserError unless the servers hold version `expected` of the weights, or one at most `lag` older."""
    if client.version is not None and not expected - lag <= client.version <= expected:
        raise UserError(f"the servers hold version {client.version} of the weights, not {expected}")
