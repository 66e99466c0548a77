"""What processes that have ended left in the spool: earlier starts of the flow, and rollout workers that were lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.rejections import Rejections, stale_reason
from areal_tasks.rollout.spooling import Spool
from areal_tasks.rollout.suspects import Suspects
from schemas.manifest import RejectedGroup, SpoolRecord

log = logging.getLogger(__name__)


def recover(tracker: GroupTracker, spool: Spool, why: str) -> tuple[list[RejectedGroup], list[RejectedGroup]]:
    """Give the tracker what earlier starts of the flow left in the spool.

    Returns the groups that they rejected, and those that are stale, because of `why`: these are not recorded yet.
    """
    waiting, rejected = spool.recover(tracker.settled)
    stale = [RejectedGroup(index=index, reason=stale_reason(why)) for index in tracker.restore(waiting)]
    for group in [*rejected, *stale]:
        tracker.reject(group.index)
    spool.forget(group.index for group in stale)
    if waiting:
        log.info("%d finished groups are in the spool; %d of them can be used", len(waiting), tracker.ready())
    return rejected, stale


@dataclass
class Losses:
    """Groups of lost workers, which stay live until it is known which of them the worker has recorded.

    A worker may record groups and be killed before the flow has received that event. `closing`: for each of its groups,
    the number of the worker's start, which is being closed.
    """

    tracker: GroupTracker
    spool: Spool
    suspects: Suspects
    rejections: Rejections
    closing: dict[int, int] = field(default_factory=dict)

    def add(self, start: int, groups: Collection[int]) -> None:
        """Add the groups of a lost worker, which no worker has now."""
        self.closing |= dict.fromkeys(groups, start)

    def forget(self, groups: Collection[int]) -> None:
        """Forget groups that are settled, or begin again."""
        for group in groups:
            self.closing.pop(group, None)

    async def close(self, start: int) -> list[int]:
        """Close a start, so that its process can record nothing if it still runs. Returns the groups that are lost."""
        unknown = await asyncio.to_thread(self.spool.close, start)
        for record in [*self.spool.records(self._of(start)), *unknown]:
            self._keep(record)
        lost = self._of(start)
        self.forget(lost)
        return lost

    def _of(self, start: int) -> list[int]:
        return [group for group, of in self.closing.items() if of == start]

    def _keep(self, record: SpoolRecord) -> None:
        """Keep the groups of a record that are still needed.

        A copy that is older than the group in the tracker was made under an earlier lease: the group begins again.
        """
        of_start = [group for group in record.finished if self.closing.get(group.index) == record.start]
        kept = {group.index: group.version for group in of_start if group.version >= self.tracker.version(group.index)}
        for group in kept.keys() & self.tracker.running.of.keys():
            self.tracker.finish(group, kept[group])
            self.suspects.clear(group)
            self.rejections.keep()
        self.spool.note(record, kept)
        self.forget(kept)
