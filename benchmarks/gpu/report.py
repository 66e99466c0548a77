"""The figures next to their targets: one Markdown table and one JSON file from the results of a machine.

    python -m benchmarks.gpu.report RESULTS.jsonl … [--out FOLDER]

A ratio takes the newest result of ours and the best result of its baseline, both of one device and of one size of work
(samples, lengths, tokens). What was not measured is left out; a missed target says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Record, load
from benchmarks.gpu.settings import step_length
from benchmarks.gpu.shapes import SHAPES, mfu

SIZES: Final = ("135m", "0.5b", "1.5b")
USUAL: Final = (128, 1024)  # samples of an optimizer step, and their length, unless a command says otherwise
BARE_LIMIT: Final = {"135m": 1.25, "1.5b": 1.10}
#: Seconds until a server answers under new weights, by transport and by what the store lies on.
WEIGHTS_LIMIT: Final = {
    ("tensor", "memory"): 0.3,
    ("nccl", "memory"): 0.3,
    ("store", "memory"): 1.0,
    ("store", "S3"): 3.0,
}
#: Of a whole run: seconds until its servers held weights that were written to the store, and that were not.
READY: Final = ("weights_ready_written_seconds", "weights_ready_seconds")
#: What results must say to be compared with others.
SAID: Final = {
    "trainer_core": {"varied", "rows", "length"},
    "our_iteration": {"groups", "group_size", "minibatches", "kl", "not_seen"},
    "weights": {"since"},
}


@dataclass(frozen=True)
class Figure:
    """One line of the table; `reached` is None where the issue states no target."""

    what: str
    device: str
    shape: str
    value: float
    target: str
    reached: bool | None
    ours: str
    baseline: str


def at_least(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"≥ {limit:g}", value >= limit)


def surely_at_least(limit: float, error: float) -> Callable[[float], tuple[str, bool | None]]:
    """Reached or missed only by more than the standard error."""

    def judged(value: float) -> tuple[str, bool | None]:
        open_still = abs(value - limit) <= error
        return (f"≥ {limit:g}, undecided", None) if open_still else (f"≥ {limit:g}", value > limit)

    return judged


def at_most(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"≤ {limit:g}", value <= limit)


def above(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"> {limit:g}", value > limit)


def figure(
    what: str, ours: Record, value: float, target: Callable[[float], tuple[str, bool | None]], mine: str, baseline: str
) -> Figure:
    """A line about a result of ours."""
    text, reached = target(value)
    return Figure(what, ours["device"], ours["shape"], round(value, 4), text, reached, mine, baseline)


class Results:
    """Look-ups in the results of one device."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self.rows = rows

    def all(self, what: str, **wanted: object) -> list[Record]:
        """The results of that kind that say exactly this of themselves, in order."""
        return [r for r in self.rows if r["what"] == what and wanted.items() <= r.items()]

    def newest(self, what: str, **wanted: object) -> Record | None:
        """The last result of that kind."""
        return next(iter(reversed(self.all(what, **wanted))), None)

    def best(self, what: str, **wanted: object) -> Record | None:
        """The fastest."""
        return max(self.all(what, **wanted), key=lambda r: float(r["tokens_per_second"]), default=None)


def figures(rows: Sequence[Record]) -> list[Figure]:
    """All that these results allow; what was measured on different devices is never compared."""
    found: list[Figure] = []
    for device in dict.fromkeys(r["device"] for r in rows):
        results = Results([r for r in rows if r["device"] == device and is_comparable(r)])
        for shape in SIZES:
            found += training(results, shape)
            found += weights(results, shape)
            if ours := results.newest("our_iteration", shape=shape):
                found += [*generation(results, ours), *iterations(results, ours), *shares(ours)]
    return found


def is_comparable(row: Record) -> bool:
    """Whether a result says of what size and kind its work was; older ones do not."""
    return row.keys() >= SAID.get(row["what"], set())


def training(results: Results, shape: str) -> Iterator[Figure]:
    """Our trainer next to the plain step, and its share of the chip, for each batch measured with equal lengths."""
    measured = results.all("trainer_core", shape=shape, varied=False)
    for rows, length in dict.fromkeys((r["rows"], r["length"]) for r in measured):
        batch = {"shape": shape, "rows": rows, "length": length}
        ours = results.newest("trainer_core", varied=False, **batch)
        assert ours is not None
        rate = float(ours["tokens_per_second"])
        of = "" if (rows, length) == USUAL else f", {rows} × {length}"
        if plain := results.best("plain_step", **batch):
            ratio = rate / plain["tokens_per_second"]
            yield figure(f"trainer ÷ plain compiled step{of}", ours, ratio, above(1), _rate(ours), _rate(plain))
        target = at_least(0.5) if shape == "1.5b" else _no_target
        share = mfu(SHAPES[shape], rate, int(length))
        yield figure(f"trainer MFU{of}", ours, share, target, _rate(ours), "989 TFLOP/s")


def generation(results: Results, ours: Record) -> Iterator[Figure]:
    """The rollout stage compared with raw SGLang."""
    raw, mine = raw_server(results, ours), f"{ours['rollout_tokens_per_second']:,.0f} tokens/s, stage{_cache(ours)}"
    if raw is None:
        return
    if raw.get("alternating"):
        ratio, error = statistics.mean(raw["ratios"]), raw["standard_error"]
        target, theirs = surely_at_least(0.97, error), f"{_rate(raw)}; mean of {len(raw['ratios'])} pairs ± {error:.3f}"
    else:
        ratio = ours["rollout_tokens_per_second"] / raw["tokens_per_second"]
        target, theirs = at_least(0.97), f"{_rate(raw)}{_cache(raw)}"
    yield figure("rollout stage ÷ raw SGLang", ours, ratio, target, mine, theirs)


def weights(results: Results, shape: str) -> Iterator[Figure]:
    """How long new weights take to arrive: without Prefect up to an answer, and in whole runs until they are held."""
    for (transport, through), limit in WEIGHTS_LIMIT.items():
        target = at_most(limit) if shape == "1.5b" else _no_target
        way = f"{transport}{f' through {through}' if transport == 'store' else ''}"
        if row := results.newest("weights", shape=shape, transport=transport, through=through):
            mine = f"median of {len(row['answered'])}, without Prefect"
            yield figure(f"new weights answer, {way}, s", row, row["answered_seconds"], target, mine, "")
        ours = results.newest("our_iteration", shape=shape, transport=transport)
        seconds = ours and through == _medium(ours) and ours.get(READY[transport != "store"])
        if ours and seconds:
            mine = "mean of a run's iterations, with Prefect, at most"
            yield figure(f"new weights held, {way}, s", ours, seconds, target, mine, "")


def iterations(results: Results, ours: Record) -> Iterator[Figure]:
    """Whole iterations compared with their bare parts."""
    shape, seconds = ours["shape"], _iteration(ours)
    bare = bare_seconds(results, ours)
    if bare is not None:
        target = at_most(BARE_LIMIT[shape]) if shape in BARE_LIMIT else _no_target
        ratio = ours["iteration_seconds"] / (bare[0] + bare[1])
        parts = f"{bare[0]:.2f} s SGLang + {bare[1]:.2f} s plain step ({bare[2]})"
        yield figure("iteration ÷ bare parts", ours, ratio, target, seconds, parts)


def shares(ours: Record) -> Iterator[Figure]:
    """What the pipeline costs; without a target where it lacks a cost that no iteration of the run had."""
    at_15b, seconds = ours["shape"] == "1.5b", _iteration(ours)
    missing = " and ".join(ours["not_seen"])
    what = "all but generation and training ÷ iteration" + (f", **without {missing}**" if missing else "")
    target = at_most(0.05) if at_15b and not missing else _no_target
    yield figure(what, ours, ours["overhead_share"], target, seconds, "")
    target = at_most(0.02) if at_15b else _no_target
    alone = ours["tables_and_orchestration_share"]
    yield figure("tables and orchestration alone ÷ iteration", ours, alone, target, seconds, "")


def raw_server(results: Results, ours: Record) -> Record | None:
    """Raw SGLang for as many requests of as many tokens: in turns with this run if it was, else the best."""
    if among := results.newest("raw_sglang", run=ours["run"], alternating=True):
        return among
    return results.best("raw_sglang", shape=ours["shape"], new_tokens=ours["new_tokens"], requests=_samples(ours))


def bare_seconds(results: Results, ours: Record) -> tuple[float, float, str] | None:
    """Raw SGLang's time for the iteration's tokens, the plain compiled step's and its variant.

    None where one was not measured on as many requests and sequences, of the same length.
    """
    raw = raw_server(results, ours)
    plain = results.best("plain_step", shape=ours["shape"], rows=_samples(ours), length=step_length(ours))
    if raw is None or plain is None:
        return None
    return (
        ours["generated_tokens"] / raw["tokens_per_second"],
        ours["mean_tokens"] * _samples(ours) / plain["tokens_per_second"],
        plain["variant"],
    )


def _no_target(value: float) -> tuple[str, bool | None]:
    return "", None


def _samples(ours: Record) -> int:
    return int(ours["groups"]) * int(ours["group_size"])


def _iteration(ours: Record) -> str:
    """Seconds of an iteration, and of what kind it was."""
    many, kl = ours["minibatches"], "no KL" if ours["kl"] == "none" else f"KL in the {ours['kl']}"
    batches = f"{many} minibatch{'es' if many > 1 else ''}"
    return f"{ours['iteration_seconds']:.2f} s; {batches}, {kl}, store on {_medium(ours)}"


def _medium(ours: Record) -> str:
    """What the store lay on."""
    url = ours["store"]
    return "S3" if url.startswith("s3://") else "memory" if url.startswith("file:///dev/shm") else "disk"


def _cache(row: Record) -> str:
    """The size of a server's cache, and whether it was ever full."""
    if not row.get("cache_tokens"):
        return ""
    full = f", full {row['retractions']} times" if row["retractions"] else ""
    return f", cache of {row['cache_tokens']:,} tokens{full}"


def _rate(row: Record) -> str:
    how = row.get("variant") or row.get("backend") or ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{', ' if how else ''}{how}"


def markdown(found: Sequence[Figure], rows: Sequence[Record]) -> str:
    """A table for each device, under its name."""
    devices = dict.fromkeys(r["device"] for r in rows)
    return "\n".join(
        _table([f for f in found if f.device == device], [r for r in rows if r["device"] == device])
        for device in devices
    )


def _table(found: Sequence[Figure], rows: Sequence[Record]) -> str:
    head = [
        f"{rows[0]['device']} · {_span([r['date'] for r in rows])} · {_versions(rows)}",
        "",
        "| what | shape | value | target | | ours | baseline |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    mark = {True: "reached", False: "**missed**", None: ""}
    lines = [
        f"| {f.what} | {f.shape} | {f.value:.3f} | {f.target} | {mark[f.reached]} | {f.ours} | {f.baseline} |"
        for f in found
    ]
    runs = sorted({f"{r['run']} (flow run {r['flow_run']})" for r in rows if r["what"] == "our_iteration"})
    old = sum(not is_comparable(r) for r in rows)
    notes = [f"Runs: {', '.join(runs)}"] if runs else []
    notes += [f"Left out, since they do not say what they are comparable with: {old} results"] if old else []
    return "\n".join([*head, *lines, *(["", *notes] if notes else []), ""])


def _span(dates: Sequence[str]) -> str:
    return min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"


def _versions(rows: Sequence[Record]) -> str:
    merged = {name: version for row in rows for name, version in row["versions"].items()}
    return ", ".join(f"{name} {version}" for name, version in merged.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder for figures.md and figures.json")
    arguments = parser.parse_args()
    rows = load(*arguments.results)
    found = figures(rows)
    text = markdown(found, rows)
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "figures.md").write_text(text)
        body = {"figures": [asdict(f) for f in found], "results": rows}
        (arguments.out / "figures.json").write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
