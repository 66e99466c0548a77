"""The kill matrix: SIGKILL of every process of a run, at random instants and around every kind of commit.

    python tests/chaos/matrix.py [--only flow,trainer] [--rounds 20] [--commits 1] [--eta 0] [--s3] [--limit 60] …

Each victim gets runs of the quickstart of its own, of which only the victim is killed. A round waits until
the run is at work, kills, and measures the seconds until two more iterations are committed: the second of them was
generated after the kill. More than the limit is a failure. When the rounds are done the run goes on to its end, and
must then hold what a run holds that nothing has disturbed: the same iterations, the same content digests, the same
weights, bit by bit. With η > 0, where no two runs are alike, it must hold as many rows, every group once, no sample
older than η, and pass the audit; and each group in its spool must be in its tables bitwise as it was spooled, or
rejected: nothing was generated again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.chdir(Path(__file__).parents[2])

from scene import VICTIMS, Failed, Scene, arm, disarmed, kill, stage, wait_for  # noqa: E402
from spooled import not_as_spooled  # noqa: E402
from stage_driver import digests_of  # noqa: E402

from areal_tasks.store.backend import StoreError  # noqa: E402
from areal_tasks.store.history.audit import audit  # noqa: E402
from areal_tasks.store.query import run_sql  # noqa: E402
from flows.cli.machine import free_port  # noqa: E402

BASE, REFERENCE = "base", "reference"
POINTS = {
    "stage manifest": r"/stage=\w+/[0-9a-f]+\.json$",
    "iteration commit": r"/commit\.json$",
    "checkpoint": r"/checkpoints/version=\d+/",
    "published weights": r"/weights/version=\d+/",
}
SPOOL_POINTS = {"spool record": r"/spool/\d+/\d+\.json$"}
LIMIT_SECONDS = 60.0
HOPELESS_SECONDS = 180.0  # beyond the limit; then a run is given up
START_SECONDS = 180.0
ORPHAN_SECONDS = 15.0
#: What a flow process may take for its last log lines: Prefect's client tries again, at growing pauses, while the
#: server is away or says that its database is busy.
FAREWELL_SECONDS = 90.0


@dataclass
class Tally:
    """What the rounds of one victim came to."""

    victim: str
    limit: float = LIMIT_SECONDS  # for a run to resume
    seconds: list[float] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # the rounds over the limit
    points: int = 0
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, where: str, seconds: float) -> None:
        """Add a round."""
        self.seconds.append(seconds)
        if seconds > self.limit:
            self.late.append(f"{where}: resumed after {seconds:.1f} s, more than {self.limit:g} s")

    def row(self) -> str:
        """A line of the table."""
        if not self.seconds:
            return f"{self.victim:<10} {'no round':>7}"
        figures = f"{statistics.median(self.seconds):7.1f} {max(self.seconds):7.1f} {len(self.late):5d}"
        rounds, ended = f"{len(self.seconds):6d} {self.points:7d}", f"{self.runs:5d} {len(self.failures):8d}"
        return f"{self.victim:<10} {rounds} {figures} {ended}"


def header(limit: float) -> str:
    """What stands above the lines of the table."""
    names = f"{'victim':<10} {'rounds':>6} {'at a':>7} {'median':>7} {'worst':>7} {'over':>5}"
    units = f"{'':<10} {'':>6} {'commit':>7} {'s':>7} {'s':>7} {f'{limit:g} s':>5}"
    return f"{names} {'runs':>5} {'failures':>8}\n{units}"


@dataclass
class Matrix:
    """Runs on one store. `reference` is what an undisturbed run holds."""

    scene: Scene
    chance: random.Random
    iterations: int
    eta: int = 0
    limit: float = LIMIT_SECONDS
    reference: object = None
    waited: int = 0  # groups in the spool of the run at work, at all kills

    def prepare(self) -> None:
        """The weights that every run begins with, and the run that nothing disturbs."""
        self._undisturbed(BASE, "schedule.iterations=1")
        self._undisturbed(REFERENCE, self.overrides)
        self.reference = self._held(REFERENCE)

    def _held(self, run: str) -> dict[str, object]:
        """What does not depend on when anything happened."""
        return holds_ahead(self.scene, run, self.eta) if self.eta else holds(self.scene, run)

    @property
    def points(self) -> dict[str, str]:
        """Kinds of commit, with what their paths match."""
        return POINTS | (SPOOL_POINTS if self.eta else {})

    @property
    def overrides(self) -> str:
        length = f"schedule.iterations={self.iterations} evaluation.every=5"
        ahead = f"rollout.max_head_offpolicyness={self.eta} rollout.flush_seconds=0.1 rollout.workers=2"
        ahead = ahead if self.eta else ""
        return f"model.warm_start= model.path=run://{BASE}-sft trainer.recover_within_seconds=0.2 {length} {ahead}"

    def _undisturbed(self, run: str, overrides: str) -> None:
        flow_run = self.scene.submit(run, overrides)
        seconds = wait_for(f"{run} to be done", lambda: self.scene.state(flow_run) == "Completed", 600)
        say(f"  {run}: {seconds:.0f} s")

    def strike(self, victim: str, rounds: int, commits: int) -> Tally:
        """All rounds of one victim: at random instants, then around every kind of commit."""
        tally = Tally(victim, self.limit)
        points = [(when, kind) for kind in self.points for when in ("before", "after")]
        left: list[tuple[str, str] | None] = [*[None] * rounds, *points * commits]
        self.chance.shuffle(left)
        while left:
            tally.runs += 1
            run = f"chaos-{victim}-{tally.runs}"
            try:
                self._run(run, victim, left, tally)
            except Failed as failure:
                tally.failures.append(f"{run}: {failure}")
                say(f"  FAILED {tally.failures[-1]}")
                if len(tally.failures) > 2:
                    break
        return tally

    def _run(self, run: str, victim: str, left: list[tuple[str, str] | None], tally: Tally) -> None:
        flow_run = self.scene.submit(run, self.overrides)
        head, self.waited = -1, 0
        while left:
            head = self._next_commit(run, flow_run, head)
            if head >= self.iterations - 4:  # too near to the end for another round
                break
            seconds = self._round(run, flow_run, victim, head, left[-1])
            if seconds is None:
                break
            point = left.pop()
            tally.points += point is not None
            tally.add(f"{run}, iteration {head}, {name(point)}", seconds)
            say(f"  {len(tally.seconds):3d}  {run}, iteration {head:3d}, {name(point):<26} {seconds:6.1f} s")
        wait_for(f"{run}'s last commit", lambda: self._has(run, flow_run, self.iterations - 1), 900)
        wait_for(f"{run} to be done", lambda: self.scene.state(flow_run) == "Completed", START_SECONDS)
        self._judge(run)

    def _next_commit(self, run: str, flow_run: str, head: int) -> int:
        wait_for("a commit", lambda: self._has(run, flow_run, head + 1), START_SECONDS)
        return self.scene.committed(run, head)

    def _has(self, run: str, flow_run: str, iteration: int) -> bool:
        """Whether the iteration is committed. Raises Failed where it never will be."""
        if self.scene.committed(run, iteration - 1) >= iteration:
            return True
        if (state := self.scene.state(flow_run)) in ("Failed", "Cancelled"):
            raise Failed(f"the flow run ended {state}")
        return False

    def _round(self, run: str, flow_run: str, victim: str, head: int, point: tuple[str, str] | None) -> float | None:
        """Kill the victim once; seconds until the second iteration after it is committed. None: the run was over."""
        pid = 0

        def there() -> bool:
            nonlocal pid
            pid = self.scene.pid(victim, flow_run) or 0
            return pid > 0

        wait_for(f"the {victim}", there, START_SECONDS)
        if point is None:
            time.sleep(self.chance.uniform(0.0, 3.0))
            kill(pid)
        else:
            arm(self.scene, point[0], self.points[point[1]], pid, own=(victim, point[1]) == ("rollout", "spool record"))
            last = self.iterations - 1
            struck_or_over = lambda: not self.scene.point.exists() or self._has(run, flow_run, last)  # noqa: E731
            wait_for(f"a write {name(point)}", struck_or_over, START_SECONDS)
            if disarmed(self.scene):
                return None
        began, head = time.monotonic(), self.scene.committed(run, head)
        self.waited += waiting(self.scene, run) if self.eta else 0
        goal = min(head + 2, self.iterations - 1)
        wait_for(f"iteration {goal}", lambda: self._has(run, flow_run, goal), self.limit + HOPELESS_SECONDS)
        return time.monotonic() - began

    def _end_of_processes(self) -> None:
        try:
            wait_for("the run's services to end", lambda: not self.scene.services_left(), ORPHAN_SECONDS)
            wait_for("the flow process to end", lambda: not self.scene.left_over(), FAREWELL_SECONDS)
        except Failed as failure:
            raise Failed(f"{failure}; still there: {'; '.join(self.scene.left_over())}") from None

    def _judge(self, run: str) -> None:
        self._end_of_processes()
        found = self._held(run)
        if found != self.reference:
            raise Failed(f"it differs from a run that nothing disturbed: {difference(found, self.reference)}")
        what = f"groups once, ages at most {self.eta}, audited, {self.waited} that waited at kills as spooled"
        what = what if self.eta else "prompts, rows, digests and weights"
        say(f"  {run}: all {self.iterations} iterations, {what} as undisturbed")


def rows(scene: Scene, run: str) -> dict[str, object]:
    """How many rows each table holds of each iteration."""
    tables = ("rollout", "verify", "advantage", "train_steps", "train_samples", "samples", "publish", "evaluate")
    query = "SELECT iteration, count(*) AS n FROM {} GROUP BY 1 ORDER BY 1"
    return {table: run_sql(scene.store, run, query.format(table)).to_pylist() for table in tables}


def holds_ahead(scene: Scene, run: str, eta: int) -> dict[str, object]:
    """What asynchronous runs of one recipe have in common."""
    groups = "SELECT group_id, count(DISTINCT iteration) AS n, count(*) AS samples FROM rollout GROUP BY 1 ORDER BY 1"
    old = f"SELECT count(*) AS n FROM rollout WHERE NOT iteration - version_min BETWEEN 0 AND {eta}"
    audited = {"groups": run_sql(scene.store, run, groups).to_pylist(), "sound": audit(scene.store, run).sound}
    again = {"generated again": not_as_spooled(scene.store, run)}
    return rows(scene, run) | audited | again | {"too old": run_sql(scene.store, run, old).to_pylist()}


def waiting(scene: Scene, run: str) -> int:
    """How many groups wait in the spool now; 0 while the store is away."""
    with contextlib.suppress(StoreError):
        return len(run_sql(scene.store, run, "FROM spool WHERE state = 'waiting'"))
    return 0


def holds(scene: Scene, run: str) -> dict[str, object]:
    """All that a reader can see of a run, but times, hosts, servers and attempts."""
    found: dict[str, object] = {"digests": digests_of(scene.store, run)} | rows(scene, run)
    prompts = "SELECT iteration, group_id, prompt_id, count(*) AS n FROM rollout GROUP BY ALL ORDER BY ALL"
    found["prompts"] = run_sql(scene.store, run, prompts).to_pylist()
    return found


def difference(found: object, expected: object) -> str:
    assert isinstance(found, dict) and isinstance(expected, dict)
    kinds = [key for key in expected if found[key] != expected[key]]
    return ", ".join(f"{key} {found[key]}" if key == "generated again" else key for key in kinds)


def name(point: tuple[str, str] | None) -> str:
    return "at a random instant" if point is None else " ".join(point)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that what was started is stopped
    victims = options.only
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kinds = len(POINTS) + len(SPOOL_POINTS) * bool(options.eta)
    kills = f"{options.rounds} random instants and {2 * kinds * options.commits} commits"
    say(f"seed {seed}; {kills} each for {', '.join(victims)}")
    chance, began, tallies = random.Random(seed), time.monotonic(), list[Tally]()
    with tempfile.TemporaryDirectory(prefix="arealflow-chaos-") as folder:
        for on_s3 in (False, True):
            if some := [v for v in victims if (options.s3 or v == "s3") == on_s3]:
                tallies += play(Path(folder) / ("s3" if on_s3 else "file"), on_s3, some, options, chance)
    sys.exit(not report(tallies, seed, time.monotonic() - began, options.table))


def play(
    home: Path, on_s3: bool, victims: Sequence[str], options: argparse.Namespace, chance: random.Random
) -> list[Tally]:
    """All rounds of these victims on one store."""
    with stage(home, free_port(4800), on_s3, chance) as scene:
        matrix = Matrix(scene, chance, options.iterations, options.eta, options.limit)
        say(f"undisturbed runs in {scene.store.url}")
        matrix.prepare()
        return list(struck(matrix, victims, options.rounds, options.commits))


def struck(matrix: Matrix, victims: Sequence[str], rounds: int, commits: int) -> Iterator[Tally]:
    for victim in victims:
        say(f"killing the {victim}")
        tally = matrix.strike(victim, rounds, commits)
        say(f"{header(tally.limit)}\n{tally.row()}")
        yield tally


def report(tallies: Sequence[Tally], seed: int, seconds: float, table: str) -> bool:
    """Print the table, and write it where it was asked for. Returns whether nothing failed."""
    failed = [f"FAILED {failure}" for tally in tallies for failure in (*tally.failures, *tally.late)]
    rows = [tally.row() for tally in tallies]
    lines = [header(tallies[0].limit), *rows, f"seed {seed}, {seconds / 60:.0f} min in all", *failed]
    say("\n" + "\n".join(lines))
    if table:
        Path(table).write_text("\n".join(lines) + "\n")
    return not failed


def victims_of(only: str) -> list[str]:
    """The victims that `--only` names; all where it names none."""
    named = only.split(",") if only else VICTIMS
    if unknown := [name for name in named if name not in VICTIMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the victims are {', '.join(VICTIMS)}")
    return [victim for victim in VICTIMS if victim in named]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="The kill matrix.")
    made.add_argument("--only", default="", type=victims_of, help=f"victims, of {', '.join(VICTIMS)}")
    made.add_argument("--rounds", type=int, default=20, help="kills at random instants for each victim")
    made.add_argument("--commits", type=int, default=1, help="kills before, and after, each kind of commit")
    made.add_argument("--eta", type=int, default=0, help="rollout.max_head_offpolicyness of the runs")
    made.add_argument("--s3", action="store_true", help="all runs on an S3 server, not that victim's alone")
    made.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds for a run to resume; more on a busy machine"
    )
    made.add_argument("--seed", type=int, help="of all chance; the first line says which it was")
    made.add_argument("--iterations", type=int, default=60, help="length of each run")
    made.add_argument("--table", default="", help="file for the summary")
    return made


if __name__ == "__main__":
    main()
