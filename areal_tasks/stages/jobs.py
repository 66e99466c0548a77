"""Jobs, which are stages of an iteration with everything that they need; the flow runs them as tasks. Their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal_tasks.stages.build import Built, PrefectIds, build
from areal_tasks.stages.stage import Context, Stage


@dataclass(frozen=True)
class Job:
    """A stage to be built, and everything it needs."""

    stage: Stage
    context: Context
    inputs: Mapping[str, Built]

    @property
    def label(self) -> str:
        return self.stage.label(self.context)

    def run(self, ids: PrefectIds) -> Built:
        with self.context.engines.watchdog.waiting(self.label):
            return build(self.stage, self.context, self.inputs, ids)


Execute = Callable[[Sequence[Job]], list[Built]]


def run_directly(jobs: Sequence[Job]) -> list[Built]:
    """The jobs one after the other, without Prefect."""
    return [job.run(PrefectIds()) for job in jobs]


@dataclass(frozen=True)
class IterationResult:
    """A committed iteration and its results by stage; those of an earlier iteration by label."""

    iteration: int
    of: int
    built: Mapping[str, Built]
    seconds: float
    eta: int = 0  # rollout.max_head_offpolicyness in this iteration

    @property
    def news(self) -> list[Built]:
        """Results that no earlier commit names: those of this iteration, and late ones (by label) of an earlier one."""
        found = self.built.items()
        return [one for name, one in found if " " in name or one.manifest.iteration == self.iteration]
