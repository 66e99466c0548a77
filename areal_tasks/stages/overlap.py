"""What runs concurrently with iterations: a publication, and the evaluation of a version that servers hold.

There is at most one of each: the next one waits for the previous one. The next commit names what has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Execute, Job
from areal_tasks.stages.publish import published_late
from areal_tasks.store.parallel import in_background

Results = Mapping[str, Built]  # by label: a later iteration has such stages of its own


class Overlap:
    """The publication and the evaluation in progress. `execute` runs jobs; it is called in other threads."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute
        self._publication: Future[Results] | None = None
        self._evaluation: tuple[Job, Future[Built]] | None = None  # begun by the thread of the publication, at its end

    @property
    def evaluating(self) -> int | None:
        """The iteration whose evaluation is under way."""
        return None if self._evaluation is None else self._evaluation[0].context.iteration

    def begin(self, publish: Callable[[], Results], evaluation: Job | None, several: bool) -> None:
        """Begin `publish`, and then the evaluation of the version that it gives the servers.

        If there are `several` servers, and the store has that version, one of them is held for the evaluation.
        """
        assert self._publication is None and None in (evaluation, self._evaluation), "one of each at a time"

        def work() -> Results:
            """What was published, once the evaluation has begun."""
            published = publish()
            if evaluation is not None:
                job = on_own_server(evaluation, published) if several else evaluation
                self._evaluation = job, in_background(lambda: self._execute([job])[0], job.label)
            return published

        self._publication = in_background(work, "publication")

    def take(self, evaluation: bool) -> dict[str, Built]:
        """The results of the publication, which this waits for, and those of the evaluation if it has ended.

        Waits for the evaluation if `evaluation` is true, or if it uses all servers. Raises what they raised.
        """
        publication, self._publication = self._publication, None
        found = dict(publication.result()) if publication is not None else {}
        if self._evaluation is not None:
            job, result = self._evaluation
            alone = job.context.held is not None  # else all servers keep its weights until its end
            if evaluation or not alone or result.done():
                found[job.label] = result.result()
                self._evaluation = None
        return found

    def wait(self) -> None:
        """Return when no publication is under way."""
        if self._publication is not None:
            wait([self._publication])


def on_own_server(job: Job, published: Results) -> Job:
    """The evaluation, on a server of its own if the store has the weights, which may have been `published` just now."""
    context = job.context
    ref = published_late(context.store, published.values(), context.iteration) or context.weights
    return replace(job, context=replace(context, held=ref)) if ref.written else job
