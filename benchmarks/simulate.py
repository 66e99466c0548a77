"""The speed-up to expect of asynchrony: a discrete-event simulation with measured times and the real staleness rule.

    python -m benchmarks.simulate                       # speed-up by η, rule and split, on two and four GPUs
    python -m benchmarks.simulate times.json            # with the times of another model or machine

A server decodes n samples at once, whose caches hold t tokens, in steps of `step + step_per_sample · n +
step_per_token · t` seconds; each step adds one token per sample.
`areal_tasks.rollout.group_tracker` decides which groups begin and which an iteration takes, exactly as in a run. The
duration of training is the number of tokens over the speed of its GPUs. New weights take `publish` seconds to reach the
servers, and interrupt them for as long as the mode takes; training continues meanwhile. One version is under way at a
time, and the newest follows it. Nothing is evaluated or saved.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.staleness import Rule, Staleness


@dataclass(frozen=True)
class Times:
    """Seconds and rates of one model on one kind of GPU.

    The defaults are measured: 1.5B on two H100s (`gpu-h100-asynchrony-split-4.json`, aborts `…-split-4-abort-2.json`).
    """

    step: float = 0.0042  # of decoding, however few samples
    step_per_sample: float = 1.35e-5
    step_per_token: float = 7.0e-9  # in the caches of the samples
    prefill_rate: float = 168_000.0  # tokens per second that a server prefills
    train_rate: float = 40_500.0  # tokens per second and GPU
    train_fixed: float = 0.16  # seconds per iteration, whatever its tokens: commit, pure stages
    compilation: float = 0.0  # what the first training takes more
    publish: float = 0.4
    publish_waits: bool = False  # the trainer, for the end of a publication
    pause: float = 0.1  # in place: what the servers stand still
    abort: float = 0.52  # until all requests have ended


@dataclass(frozen=True)
class Load:
    """What a run generates: groups of samples with log-normal lengths, in tokens."""

    groups: int = 64
    group_size: int = 8
    median: float = 600.0
    sigma: float = 1.0
    longest: int = 8192
    prompt: int = 100
    iterations: int = 60

    def lengths(self, index: int) -> list[int]:
        """The lengths of a group's samples: a function of its number alone, so that every layout has the same."""
        draw = random.Random(index)
        return [
            min(self.longest, max(1, round(draw.lognormvariate(math.log(self.median), self.sigma))))
            for _ in range(self.group_size)
        ]


class Work(Protocol):
    """A load as the simulation sees it: `lengths` of the samples of a group, in generated tokens."""

    @property
    def groups(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def prompt(self) -> float: ...
    @property
    def iterations(self) -> int: ...
    def lengths(self, index: int) -> Sequence[int]: ...


@dataclass(frozen=True)
class Layout:
    """GPUs that generate and GPUs that train; `shared`: the same ones do both in turn (synchronous only)."""

    generating: int
    training: int
    eta: int
    rule: Rule = "strict"
    mode: str = "in_place"  # or abort, drain
    shared: bool = False
    slots: int = 512  # samples that one server decodes at once
    pace: int | None = None

    @property
    def gpus(self) -> int:
        return self.generating if self.shared else self.generating + self.training


@dataclass
class Server:
    """Samples share each decoding step, so that progress is counted in steps and the earliest end is on a heap."""

    times: Times
    slots: int
    prompt: float  # tokens of each
    version: int = 0
    progress: float = 0.0
    clock: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)  # end and begin (progress), group between
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # length, group
    begun: float = 0.0  # sum of what `progress` was when each of the running samples began

    def samples(self) -> int:
        """How many samples it has, those that wait included."""
        return len(self.running) + len(self.waiting)

    def next_end(self) -> float:
        """When the next sample ends; infinite if none is running."""
        self._admit()
        if not self.running:
            return math.inf
        steps = self.running[0][0] - self.progress
        return self.clock + steps * (self._step() + self._growth() * steps / 2)

    def advance(self, clock: float) -> None:
        if self.running and clock > self.clock:
            self.progress += self._steps(clock - self.clock)
        self.clock = max(self.clock, clock)

    def ended(self) -> Iterator[int]:
        """The groups of samples that have ended by now."""
        while self.running and self.running[0][0] <= self.progress + 1e-6:
            _, group, begun = heapq.heappop(self.running)
            self.begun -= begun
            yield group

    def stall(self, seconds: float) -> None:
        """Stop decoding for `seconds`."""
        self.clock += seconds

    def cached_tokens(self) -> float:
        """Of all running samples, prompts included."""
        return len(self.running) * (self.progress + self.prompt) - self.begun

    def _step(self) -> float:
        """Seconds of the next step."""
        times = self.times
        return times.step + times.step_per_sample * len(self.running) + times.step_per_token * self.cached_tokens()

    def _growth(self) -> float:
        """Seconds that each step takes longer than the one before it."""
        return self.times.step_per_token * len(self.running)

    def _steps(self, seconds: float) -> float:
        """The number of steps in a time: the solution of `seconds = steps · (step + growth · steps / 2)`."""
        step, growth = self._step(), self._growth()
        return 2 * seconds / (step + math.sqrt(step * step + 2 * growth * seconds))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.progress + length, group, self.progress))
            self.begun += self.progress


@dataclass(frozen=True)
class Outcome:
    """Seconds of a run, the share in which the trainer had nothing to do, and the lag of each group consumed.

    `ends`: the time at which each iteration's weights were complete.
    """

    seconds: float
    trainer_idle: float
    lags: dict[int, int]
    ends: Sequence[float]


class Simulation:
    """One run.

    The cost of an event does not depend on the number of servers: `upcoming` has each one's next end, and a server is
    advanced only when something happens to it. `loads` has the number of its samples. Both are heaps in which entries
    that no longer hold stay until they are met.
    """

    def __init__(self, load: Work, layout: Layout, times: Times) -> None:
        self.load, self.layout, self.times = load, layout, times
        rule = Staleness(lambda k: layout.eta, load.iterations - 1, lambda j: load.groups, layout.rule)
        self.tracker = GroupTracker(rule, 0, pace=layout.pace)
        self.servers = [Server(times, layout.slots, load.prompt) for _ in range(layout.generating)]
        self.upcoming: list[tuple[float, int]] = []
        self.ends_of: list[float] = [math.inf] * layout.generating
        self.loads = [(0, n) for n in range(layout.generating)]
        self.news = True  # something has happened since groups were last begun and taken
        self.full = False  # groups wait for room on the servers
        self.left: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.lags: Counter[int] = Counter()
        self.clock, self.trained, self.trained_seconds = 0.0, 0, 0.0
        self.ready: deque[int] = deque()  # tokens of the batches that wait for the trainer
        self.training_ends = math.inf
        self.ends: list[float] = []
        self.arrives, self.sent = math.inf, 0  # when servers get the version that is under way, or was the last one

    def run(self) -> Outcome:
        while self.trained < self.load.iterations:
            if self.news or self.full:
                self.news = False
                self._begin_groups()
                self._take()
                self._train()
            self._step()
        return Outcome(self.clock, 1 - self.trained_seconds / self.clock, dict(sorted(self.lags.items())), self.ends)

    def _least_loaded(self) -> int:
        while self.loads[0][0] != self.servers[self.loads[0][1]].samples():
            heapq.heappop(self.loads)
        return self.loads[0][1]

    def _changed(self, n: int) -> None:
        """Note when the next sample of a server ends, after a change of what it does."""
        server = self.servers[n]
        if (end := server.next_end()) != self.ends_of[n]:
            self.ends_of[n] = end
            heapq.heappush(self.upcoming, (end, n))
        heapq.heappush(self.loads, (server.samples(), n))

    def _begin_groups(self) -> None:
        self.full = False
        while self.tracker.next < self.load.iterations:
            server = self.servers[self._least_loaded()]
            self.full = server.samples() >= self.layout.slots * 2
            begun = [] if self.full else self.tracker.lease(server.version)
            for index in begun:
                lengths = self.load.lengths(index)
                self.left[index], self.tokens[index] = len(lengths), sum(lengths)
                target = self._least_loaded()
                self.servers[target].advance(self.clock)
                self.servers[target].waiting.extend((length, index) for length in lengths)
                self._changed(target)
            if not begun:
                return

    def _take(self) -> None:
        """Take an iteration's groups, at most one iteration ahead of the trainer."""
        if self.tracker.next >= self.load.iterations or self.tracker.next > self.trained + 1 or len(self.ready) > 1:
            return
        chosen = self.tracker.take()
        if chosen is not None:
            self.lags.update(self.tracker.next - self.tracker.finished.of[group] for group in chosen)
            self.ready.append(sum(self.tokens.pop(group) for group in chosen))
            self.tracker.consume(chosen)
            self.news = True

    def _train(self) -> None:
        waits = self.times.publish_waits and self.arrives < math.inf
        if self.ready and self.training_ends == math.inf and not waits:
            tokens = self.ready.popleft() + self.load.prompt * self.load.groups * self.load.group_size
            seconds = tokens / (self.times.train_rate * self.layout.training)
            self.trained_seconds += seconds
            first = self.times.compilation if self.trained == 0 else 0.0
            self.training_ends = self.clock + seconds + self.times.train_fixed + first

    def _step(self) -> None:
        """Advance to the next event."""
        while self.upcoming and self.upcoming[0][0] != self.ends_of[self.upcoming[0][1]]:
            heapq.heappop(self.upcoming)
        now = min(self.arrives, self.upcoming[0][0] if self.upcoming else math.inf, self.training_ends)
        if now == math.inf:
            raise RuntimeError("nothing can happen any more: the rule has led into a deadlock")
        self.clock = now
        while self.upcoming and self.upcoming[0][0] <= now:
            end, n = heapq.heappop(self.upcoming)
            if end == self.ends_of[n]:
                self.ends_of[n] = math.inf
                self._end_samples(n)
        if now >= self.training_ends:
            self.trained, self.training_ends = self.trained + 1, math.inf
            self.ends.append(now)
            self.news = True
        if now >= self.arrives:
            self._deliver(self.sent)
            self.arrives, self.news = math.inf, True
        if self.sent < self.trained and self.arrives == math.inf:
            self.arrives, self.sent = now + self.times.publish, self.trained

    def _end_samples(self, n: int) -> None:
        """Count the samples of one server that have ended by now."""
        self.servers[n].advance(self.clock)
        for group in self.servers[n].ended():
            self.left[group] -= 1
            if not self.left[group]:
                self.tracker.finish(group, self.tracker.running.of[group])
                self.news = True
        self._changed(n)

    def _deliver(self, version: int) -> None:
        for n, server in enumerate(self.servers):
            server.version = max(server.version, version)
            server.advance(self.clock)
            if not server.running:
                continue
            if self.layout.mode == "in_place":
                server.stall(self.times.pause)
            elif self.layout.mode == "abort":
                server.stall(self.times.abort + server.cached_tokens() / self.times.prefill_rate)
            self._changed(n)


def synchronous(gpus: int) -> Layout:
    """All GPUs generate, then all train."""
    return Layout(gpus, gpus, 0, shared=True)


def speed_up(load: Load, layout: Layout, times: Times) -> tuple[float, Outcome]:
    """The speed-up over a synchronous run on as many GPUs."""
    base = Simulation(load, synchronous(layout.gpus), times).run()
    found = Simulation(load, layout, times).run()
    return base.seconds / found.seconds, found


def row(load: Load, layout: Layout, times: Times) -> str:
    ratio, found = speed_up(load, layout, times)
    total = sum(found.lags.values())
    lags = " ".join(f"{lag}:{n / total:.0%}" for lag, n in found.lags.items())
    name = f"{layout.generating} + {layout.training}, η = {layout.eta}, {layout.rule}, {layout.mode}"
    seconds = found.seconds / load.iterations
    return f"| {name} | {ratio:.2f} | {seconds:.1f} | {found.trainer_idle:.0%} | {lags} |"


HEAD = "| layout | speed-up | seconds per iteration | trainer idle | groups by lag |\n|---|---|---|---|---|"


def tables(load: Load, times: Times) -> Iterator[str]:
    """The tables that `docs/guides/asynchrony.md` shows."""
    etas: Sequence[int] = (1, 2, 4, 8)
    yield f"{load}\n\n{HEAD}"
    for half in (1, 2):
        yield from (row(load, Layout(half, half, eta), times) for eta in etas)
    yield from (row(load, Layout(1, 1, eta, "admission"), times) for eta in etas)
    yield row(load, Layout(1, 1, 4, mode="abort"), times)
    equal = replace(load, sigma=0.0)
    yield f"\nAll lengths {equal.median:g}:\n\n{HEAD}"
    yield from (row(equal, Layout(half, half, 2), times) for half in (1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", nargs="?", type=Path, help="JSON with fields of Times")
    parser.add_argument("--iterations", type=int, default=Load.iterations)
    options = parser.parse_args()
    times = Times(**json.loads(options.times.read_text())) if options.times else Times()
    print(json.dumps(asdict(times)))
    for line in tables(Load(iterations=options.iterations), times):
        print(line, flush=True)


if __name__ == "__main__":
    main()
