"""Continuous batching in one thread: admit, prefill a chunk, decode a token for every slot, deliver, repeat.

Deterministic mode makes every token a function of its own sequence alone: passes have shapes that `proven_shapes` has
tested, sampling is keyed by (seed, position), and rows do not influence each other in any other way.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from areal_tasks.engines.embedded.runner import Runner, Shapes, chunk_of, proven_shapes
from areal_tasks.engines.embedded.sequence import Batch, Job, Sequence, sample, share_prompts, uniforms
from areal_tasks.engines.embedded.slots import Rows, Slots
from areal_tasks.engines.ends import Detokenizer, tail_length

log = logging.getLogger(__name__)
PauseMode = Literal["abort", "in_place"]
T = TypeVar("T")


class NotFinite(Exception):
    """The model's logits are not finite: its weights are damaged."""


class Engine:
    """Owns the model, in a thread of its own. Every public method may be called from any thread."""

    def __init__(self, runner: Runner, slots: int, *, version: str, detokenizer: Detokenizer,
                 eos: frozenset[int], deterministic: bool,
                 on_failure: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.runner = runner
        self.version = version
        self.detokenizer = detokenizer
        self.eos = eos
        self.deterministic = deterministic
        self.failure: str | None = None
        self.paused = False
        self.steps = 0
        self._on_failure = on_failure
        self._threads = torch.get_num_threads()
        self._slots = Slots(runner.rows, slots, runner.capacity)
        self._queue: deque[Batch] = deque()
        self._prefills: list[Batch] = []  # those whose prompt is being computed
        self._jobs: dict[Sequence, Job] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- called from other threads ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and wait until the shapes are proven."""
        ready = self._command(lambda: None)
        self._thread.start()
        ready.result()

    def close(self) -> None:
        """End the thread; unfinished sequences are aborted. May be repeated."""
        if self.failure is None:
            self._command(self._close).result()
        self._thread.join()

    def submit(self, sequences: list[Sequence]) -> Future[None]:
        """Queue sequences; the future ends when all have finished."""
        job = Job(sequences)
        accepted = self._command(lambda: self._accept_job(job))
        accepted.add_done_callback(lambda f: job.done.set_exception(f.exception()) if f.exception() else None)
        return job.done

    def abort(self, wanted: Callable[[Sequence], bool]) -> Future[int]:
        """Finish the wanted sequences with the tokens they have; returns how many there were."""
        return self._command(lambda: self._abort(wanted))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating: abort running sequences, or keep them with their cache (in_place)."""
        return self._command(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._command(partial(setattr, self, "paused", False))

    def update_weights(self, weights: Mapping[str, Tensor], version: str, keep_cache: bool) -> Future[None]:
        """Replace the weights between two steps. Running sequences continue from their tokens, with recomputed caches.

        With `keep_cache` (only while paused in place) old keys and values stay: tokens sampled with them are recorded
        as `stale_kv`. Unfinished prefills start again. Raises UserError for unfit weights, and nothing is changed.
        """
        return self._command(lambda: self._update_weights(weights, version, keep_cache))

    def load(self) -> tuple[int, int]:
        """The numbers of running and of queued sequences; approximate while the engine works."""
        queued = sum(len(b.sequences) for b in list(self._queue))
        return max(len(self._jobs) - queued, 0), queued

    def _command(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            """Run the action in the engine's thread, and give its outcome to the future."""
            if self.failure is not None:
                future.set_exception(RuntimeError(self.failure))
                return
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self._commands.append(run)
        self._wake.set()
        if self.failure is not None:  # the thread has ended and runs no commands
            self._run_commands()
        return future

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                if self.deterministic:
                    self.runner.shapes = proven_shapes(self.runner)
                while not self._stop:
                    self._turn()
        except Exception as error:
            log.exception("the engine's thread failed")
            self.failure = f"the engine failed: {error!r}; see the server's log"
            self._fail_all(RuntimeError(self.failure))
            self._on_failure()
        self.failure = self.failure or "the engine was closed"
        self._run_commands()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _turn(self) -> None:
        """Run commands, then compute one chunk of prefill and one token of every active slot."""
        if not self._has_work():
            self._wake.wait()
        self._wake.clear()
        self._run_commands()
        if not self._has_work():
            return
        try:
            self._admit()
            if self._prefills:
                self._prefill()
            if self._slots.active.any():
                self._decode()
        except NotFinite as error:
            self._fail_all(error)
        self.steps += 1

    def _has_work(self) -> bool:
        return not self.paused and bool(self._queue or self._prefills or self._slots.active.any())

    def _admit(self) -> None:
        """Give free slots to queued sequences in order of arrival, until a prefill pass is full."""
        while self._queue and self._slots.free and len(self._prefills) < self._prefill_sizes(self._queue[0])[-1]:
            now, later = self._queue.popleft().split(len(self._slots.free))
            now.slots = [self._slots.take(sequence) for sequence in now.sequences]
            self._prefills.append(now)
            if later.sequences:
                self._queue.appendleft(later)

    def _prefill_sizes(self, batch: Batch) -> list[int]:
        """The numbers of rows that a prefill pass with this batch may have."""
        return self.runner.shapes.prefill_rows[chunk_of(len(batch.tokens))]

    def _prefill(self) -> None:
        """Compute one chunk of prompts with the first one's chunk size; complete prompts get their first token."""
        chunk, sizes = chunk_of(len(self._prefills[0].tokens)), self._prefill_sizes(self._prefills[0])
        group = [p for p in self._prefills if chunk_of(len(p.tokens)) == chunk][: sizes[-1]]
        logits = self.runner.prefill(*self._chunk_inputs(group, chunk, Shapes.fit(sizes, len(group))))
        ended = [i for i, p in enumerate(group) if p.last < chunk]
        for p in group:
            p.cursor += chunk
        if ended:
            done = {id(group[i]) for i in ended}
            self._prefills = [p for p in self._prefills if id(p) not in done]
            self._begin([group[i] for i in ended], logits[torch.tensor(ended)])

    def _chunk_inputs(self, group: list[Batch], chunk: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """The pass's rows, tokens, start positions, wanted offsets and length, padded to `rows` rows."""
        where = np.full(rows, self.runner.rows, np.int64)
        starts, last = np.zeros(rows, np.int64), np.full(rows, chunk - 1, np.int64)
        tokens = np.zeros((rows, chunk), np.int64)
        for i, p in enumerate(group):
            piece = p.tokens[p.cursor : p.cursor + chunk]
            where[i], starts[i], last[i] = p.slots[0], p.cursor, min(p.last, chunk - 1)
            tokens[i, : len(piece)] = piece
        length = Shapes.fit(self.runner.shapes.lengths, min(int(starts.max()) + chunk, self.runner.capacity))
        return *map(torch.from_numpy, (where, tokens, starts, last)), length  # type: ignore[return-value]

    def _begin(self, ended: list[Batch], logits: Tensor) -> None:
        """Copy the prompts' cache to all slots of their batch, activate these and choose the first tokens."""
        copies = [(p.slots[0], slot) for p in ended for slot in p.slots[1:]]
        if copies:
            sources, targets = torch.tensor(copies).unbind(1)
            self.runner.cache.copy(sources, targets, max(len(p.tokens) for p in ended))
        rows = np.array([slot for p in ended for slot in p.slots])
        owner = torch.repeat_interleave(torch.tensor([len(p.slots) for p in ended]))
        self._slots.active[rows] = True
        self._choose(rows, logits[owner], rows)

    def _decode(self) -> None:
        if not self._queue and not self._prefills:
            self._compact()
        slots, shapes = self._slots, self.runner.shapes
        active = np.flatnonzero(slots.active)
        n = Shapes.fit(shapes.rows, int(active[-1]) + 1)
        length = Shapes.fit(shapes.lengths, int(slots.position[active].max()) + 1)
        token, position = torch.from_numpy(slots.token[:n]), torch.from_numpy(slots.position[:n])
        self._choose(np.arange(n), self.runner.decode(token, position, length), active)

    def _compact(self) -> None:
        """Move the last sequences to lower slots if that at least halves the pass."""
        active = np.flatnonzero(self._slots.active)
        fewest = Shapes.fit(self.runner.shapes.rows, len(active))
        if 2 * fewest > Shapes.fit(self.runner.shapes.rows, int(active[-1]) + 1):
            return
        sources = active[active >= fewest]
        targets = np.flatnonzero(~self._slots.active[:fewest])[: len(sources)]
        length = int(self._slots.position[sources].max())
        self.runner.cache.copy(torch.from_numpy(sources), torch.from_numpy(targets), length)
        self._slots.move(sources, targets)

    def _choose(self, rows: Rows, logits: Tensor, active: Rows) -> None:
        """Sample from the logits of `rows`, and append the tokens of those that are `active`."""
        slots = self._slots
        uniform = torch.from_numpy(uniforms(slots.seed[rows], slots.position[rows] + 1))
        given = slots.given(rows)
        forced = None if given is None else torch.from_numpy(given)
        chosen = sample(logits, torch.from_numpy(slots.temperature[rows]), uniform, forced)
        tokens, logprobs = (t.numpy() for t in chosen)
        if len(active) < len(rows):  # then the rows are the first n slots
            tokens, logprobs = tokens[active], logprobs[active]
        if not np.isfinite(logprobs).all():
            raise NotFinite("the model's logits are not finite; its weights are damaged, load others")
        self._advance(active, tokens, logprobs)

    def _advance(self, rows: Rows, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        stopped, full = self._slots.accept(rows, tokens, logprobs)
        for slot in stopped.tolist():
            self._finish_slot(slot, {"type": "stop", "matched": int(self._slots.token[slot])})
        for slot in self._slots.special.intersection(rows.tolist()):
            if stops := self._slots.owner[slot].params.stop:
                found = self.detokenizer.find_stop(self._slots.tail(slot, tail_length(stops)), stops)
                if found is not None:
                    self._finish_slot(slot, {"type": "stop", "matched": found})
        for slot in full.tolist():
            if slot in self._slots.owner:  # no stop string has ended it
                self._finish_slot(slot, {"type": "length", "length": self._slots.owner[slot].limit})
        for slot in self._slots.special.intersection(rows.tolist()):
            if self._slots.owner[slot].listener is not None:
                self._slots.flush(slot, self.version)
                self._slots.owner[slot].notify()

    def _finish_slot(self, slot: int, reason: dict[str, object]) -> None:
        sequence = self._slots.owner[slot]
        self._slots.flush(slot, self.version)
        self._slots.release(slot)
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: dict[str, object]) -> None:
        sequence.finish = reason
        job = self._jobs.pop(sequence)
        job.left -= 1
        if job.left == 0:
            job.done.set_result(None)

    # -- commands, run in the thread ----------------------------------------------------------------------------

    def _accept_job(self, job: Job) -> None:
        self._jobs.update(dict.fromkeys(job.sequences, job))
        if any(sequence.given for sequence in job.sequences):
            self._requeue(job.sequences)  # first, since a publication waits for scores
        else:
            self._queue.extend(share_prompts(job.sequences))

    def _abort(self, wanted: Callable[[Sequence], bool]) -> int:
        self._requeue(self._cancel_prefills())
        reason: dict[str, object] = {"type": "abort", "message": "aborted"}
        running = [slot for slot, sequence in self._slots.owner.items() if wanted(sequence)]
        queued = [s for batch in self._queue for s in batch.sequences if wanted(s)]
        for slot in running:
            self._finish_slot(slot, reason)
        for sequence in queued:
            self._finish(sequence, reason)
        kept = [Batch(b.tokens, [s for s in b.sequences if s.finish is None]) for b in self._queue]
        self._queue = deque(b for b in kept if b.sequences)
        return len(running) + len(queued)

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda sequence: True)

    def _cancel_prefills(self) -> list[Sequence]:
        for slot in [slot for p in self._prefills for slot in p.slots]:
            self._slots.release(slot)
        sequences = [s for p in self._prefills for s in p.sequences]
        self._prefills = []
        return sequences

    def _requeue(self, sequences: list[Sequence]) -> None:
        self._queue.extendleft(reversed(share_prompts(sequences)))

    def _update_weights(self, weights: Mapping[str, Tensor], version: str, keep_cache: bool) -> None:
        back = self._cancel_prefills()  # one version must compute a whole prompt
        for slot in np.flatnonzero(self._slots.active).tolist():
            self._slots.flush(slot, self.version)
            if not keep_cache:
                back.append(self._slots.owner[slot])
                self._slots.release(slot)
        self._requeue(back)
        self.runner.load_weights(weights)
        self.version = version
        self._slots.stale |= self._slots.active

    def _fail_all(self, error: Exception) -> None:
        """Answer every job with the error, and clear the cache."""
        jobs = {id(job): job for job in self._jobs.values()}
        self._jobs.clear()
        self._queue.clear()
        self._cancel_prefills()
        for slot in np.flatnonzero(self._slots.active).tolist():
            self._slots.release(slot)
        self.runner.cache.clear()
        for job in jobs.values():
            job.done.set_exception(error)

    def _close(self) -> None:
        self._abort(lambda sequence: True)
        self._stop = True
