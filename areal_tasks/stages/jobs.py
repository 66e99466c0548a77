"""Jobs: stages of an iteration with everything that they need, which the flow runs as tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal_tasks.stages.build import Built, PrefectIds, build
from areal_tasks.stages.stage import Context, Stage


@dataclass(frozen=True)
class Job:
    """A stage to be built, its label, and everything it needs."""

    label: str
    stage: Stage
    context: Context
    inputs: Mapping[str, Built]

    def run(self, ids: PrefectIds) -> Built:
        with self.context.engines.watchdog.waiting(self.label):
            return build(self.stage, self.context, self.inputs, ids)


Execute = Callable[[Sequence[Job]], list[Built]]


def run_directly(jobs: Sequence[Job]) -> list[Built]:
    """The jobs one after the other, without Prefect."""
    return [job.run(PrefectIds()) for job in jobs]


def label_of(stage: Stage, context: Context) -> str:
    """The name of the stage's task run."""
    if stage.once:
        return stage.name
    if stage.name == "evaluate":
        return f"evaluate version {context.weights.version}"
    return f"{stage.name} {context.iteration}"
