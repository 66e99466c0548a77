"""The state of every slot as arrays, so that a step over all of them is a few array operations."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from areal_tasks.engines.embedded.sequence import Sequence

Rows = npt.NDArray[np.int64]


class Slots:
    """`rows` slots, of which the first `usable` are used; a slot holds a sequence from its prefill to its end."""

    def __init__(self, rows: int, usable: int, length: int) -> None:
        self.free = list(range(usable))  # a heap: low slots first keep the decode pass small
        self.token = np.zeros(rows, np.int64)  # the newest token, not yet in the cache
        self.position = np.zeros(rows, np.int64)  # of that token in the sequence
        self.seed = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.count = np.zeros(rows, np.int64)  # tokens generated since the slot was taken
        self.limit = np.zeros(rows, np.int64)
        self.active = np.zeros(rows, np.bool_)
        self.stale = np.zeros(rows, np.bool_)  # weights older than the current ones computed some of its cache
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.tokens = np.zeros((rows, length), np.int64)
        self.logprobs = np.zeros((rows, length), np.float32)
        self.owner: dict[int, Sequence] = {}  # of the slots that are taken
        self.special: set[int] = set()  # slots whose sequence has stop strings, a listener or given tokens

    def take(self, sequence: Sequence) -> int:
        """Give the lowest free slot to the sequence; it becomes active when its prompt is in the cache.

        Until then a decode pass writes garbage at the slot's position, that of the last prompt token: harmless, since
        the pass that first reads a position also writes it.
        """
        slot = heappop(self.free)
        self.owner[slot] = sequence
        self.seed[slot] = sequence.seed
        self.temperature[slot] = sequence.params.temperature
        self.count[slot] = 0
        self.stale[slot] = False
        self.limit[slot] = sequence.left
        self.position[slot] = len(sequence.so_far()) - 1
        stops, width = len(sequence.stop_ids), self.stop_ids.shape[1]
        if stops > width:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, stops - width)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :stops] = sorted(sequence.stop_ids)
        if sequence.params.stop or sequence.listener is not None or sequence.given:
            self.special.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot, also in the middle of its sequence."""
        del self.owner[slot]
        self.active[slot] = False
        self.position[slot] = 0
        self.temperature[slot] = 0
        self.special.discard(slot)
        heappush(self.free, slot)

    def move(self, sources: Rows, targets: Rows) -> None:
        """Move active sequences to free slots."""
        for state in (self.token, self.position, self.seed, self.temperature, self.count, self.limit, self.stop_ids,
                      self.tokens, self.logprobs, self.active, self.stale):  # fmt: skip
            state[targets] = state[sources]
        moved = set(targets.tolist())
        self.free = [slot for slot in self.free if slot not in moved]
        heapify(self.free)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.owner[target] = self.owner[source]
            if source in self.special:
                self.special.add(target)
            self.release(source)

    def given(self, rows: Rows) -> Rows | None:
        """The next token of each of `rows` if it is given, else -1; None if none is."""
        if not any(self.owner[slot].given for slot in self.special):
            return None
        return np.array([self._given(slot) if slot in self.special else -1 for slot in rows.tolist()], np.int64)

    def _given(self, slot: int) -> int:
        sequence = self.owner[slot]
        left = sequence.given[len(sequence.scores) + int(self.count[slot]) :]
        return left[0] if left else -1

    def accept(self, rows: Rows, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]) -> tuple[Rows, Rows]:
        """Append one token to each of `rows`. Returns the rows that a stop token ended, and those at their limit."""
        count = self.count[rows]
        self.tokens[rows, count] = tokens
        self.logprobs[rows, count] = logprobs
        self.token[rows] = tokens
        self.count[rows] = count + 1
        self.position[rows] += 1
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        full = (count + 1 >= self.limit[rows]) & ~stopped
        return rows[stopped], rows[full]

    def flush(self, slot: int, version: str) -> None:
        """Move the tokens since the slot was taken or last flushed to its sequence, as sampled with `version`."""
        n = int(self.count[slot])
        tokens, logprobs = self.tokens[slot, :n].tolist(), self.logprobs[slot, :n].tolist()
        self.owner[slot].record(tokens, logprobs, version, bool(self.stale[slot]))
        self.limit[slot] -= n
        self.count[slot] = 0

    def tail(self, slot: int, n: int) -> list[int]:
        count = int(self.count[slot])
        recent: list[int] = self.tokens[slot, max(count - n, 0) : count].tolist()
        missing = n - len(recent)
        return (self.owner[slot].output[-missing:] if missing > 0 else []) + recent
