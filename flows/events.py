"""Prefect events of a run: each committed iteration with its metrics, and warnings.

Their resource is the flow run, so they appear in its event feed, and automations can relate them to the flow run's own
states: `deployments/automations/alerts.yaml` does. Prefect sends events in its own thread and drops them if the server
is down; nothing here fails a run.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

from prefect.events import emit_event
from prefect.runtime import flow_run

from areal_tasks.stages.jobs import IterationResult
from areal_tasks.store.runs import Run
from flows.alerts import Alert, Metrics

STARTED: Final = "arealflow.run.started"
ADVANCED: Final = "arealflow.run.advanced"
ENDED: Final = "arealflow.run.ended"
COMMITTED: Final = "arealflow.iteration.committed"
ALERT: Final = "arealflow.alert"
#: Least time between two ADVANCED events, by which the automation for stalled runs sees progress: Prefect miscounts
#: such events if they follow each other immediately, and each is a write to its database.
ADVANCED_SECONDS: Final = 10.0


class Events:
    """Emits the events of one start of a run."""

    def __init__(self, run: Run) -> None:
        self.about = {"run": run.name, "store": run.store.url}
        self.advanced = time.monotonic()
        self.resource = {
            "prefect.resource.id": f"prefect.flow-run.{flow_run.get_id()}",
            "prefect.resource.name": flow_run.get_name() or run.name,
            "arealflow.run": run.name,
        }

    def started(self) -> None:
        """The run has an owner; its services start next."""
        self.advanced = time.monotonic()
        self._emit(STARTED, {})

    def ended(self) -> None:
        """This start of the run ended, for whatever reason; a killed process does not emit this event."""
        self._emit(ENDED, {})

    def committed(self, result: IterationResult) -> None:
        """An iteration was committed; at most every ADVANCED_SECONDS an ADVANCED event follows."""
        where = {"iteration": result.iteration, "of": result.of, "seconds": round(result.seconds, 3)}
        self._emit(COMMITTED, {**where, "metrics": finite(metrics_of(result))})
        if time.monotonic() - self.advanced >= ADVANCED_SECONDS:
            self.advanced = time.monotonic()
            self._emit(ADVANCED, where)

    def alert(self, result: IterationResult, alert: Alert) -> None:
        """A warning that this iteration raised."""
        figures = {"value": number(alert.value), "threshold": number(alert.threshold)}
        about = {"cause": alert.cause, "message": alert.message, "iteration": result.iteration}
        self._emit(f"{ALERT}.{alert.cause}", about | figures)

    def _emit(self, event: str, payload: dict[str, Any]) -> None:
        emit_event(event, self.resource, payload=self.about | payload)


def metrics_of(result: IterationResult) -> Metrics:
    """The metrics by stage of what a commit adds, without those of stages that run once."""
    return {built.manifest.stage: built.manifest.metrics for built in result.news if built.manifest.metrics}


def finite(metrics: Metrics) -> dict[str, dict[str, float | None]]:
    """The metrics for JSON, which has no NaN: None where a value is not finite."""
    return {stage: {name: number(value) for name, value in found.items()} for stage, found in metrics.items()}


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None
