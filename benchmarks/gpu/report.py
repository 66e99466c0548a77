"""The figures beside their targets: one Markdown table and one JSON file from the results of a machine.

    python -m benchmarks.gpu.report RESULTS.jsonl … [--out FOLDER]

A ratio takes the newest result of ours and the best result of its baseline, both from these files. What was not
measured is left out; a missed target says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.results import Record, load
from benchmarks.gpu.shapes import SHAPES, mfu

SIZES: Final = ("135m", "0.5b", "1.5b")
TRL_VARIANTS: Final = ("plain", "liger", "compile")  # bf16 weights and optimizer are another precision
BARE_LIMIT: Final = {"135m": 1.25, "1.5b": 1.10}
#: Seconds until a server answers under new weights, by transport and by what the store lies on.
WEIGHTS_LIMIT: Final = {
    ("tensor", "memory"): 0.3,
    ("nccl", "memory"): 0.3,
    ("store", "memory"): 1.0,
    ("store", "S3"): 3.0,
}


@dataclass(frozen=True)
class Figure:
    """One line of the table; `reached` is None where the issue states no target."""

    what: str
    shape: str
    value: float
    target: str
    reached: bool | None
    ours: str
    baseline: str


def at_least(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"≥ {limit:g}", value >= limit)


def at_most(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"≤ {limit:g}", value <= limit)


def above(limit: float) -> Callable[[float], tuple[str, bool]]:
    return lambda value: (f"> {limit:g}", value > limit)


def figure(
    what: str, shape: str, value: float, target: Callable[[float], tuple[str, bool]], ours: str, baseline: str
) -> Figure:
    text, reached = target(value)
    return Figure(what, shape, round(value, 4), text, reached, ours, baseline)


class Results:
    """Look-ups in the results of one machine."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self.rows = rows

    def newest(self, what: str, shape: str, **wanted: object) -> Record | None:
        """The last result of that kind."""
        return next(iter(reversed(self._all(what, shape, **wanted))), None)

    def best(self, what: str, shape: str, variants: Iterable[str] = (), **wanted: object) -> Record | None:
        """The fastest, of these variants."""
        found = [r for r in self._all(what, shape, **wanted) if not variants or r["variant"] in variants]
        return max(found, key=lambda r: float(r["tokens_per_second"]), default=None)

    def _all(self, what: str, shape: str, **wanted: object) -> list[Record]:
        return [
            r
            for r in self.rows
            if r["what"] == what and r["shape"] == shape and all(r.get(k, False) == v for k, v in wanted.items())
        ]


def figures(results: Results) -> list[Figure]:
    """All that these results allow."""
    found: list[Figure] = []
    for shape in SIZES:
        found += [*training(results, shape), *generation(results, shape), *iterations(results, shape)]
    return found


def training(results: Results, shape: str) -> Iterator[Figure]:
    """Our trainer beside TRL's step and the plain step, and its share of the chip."""
    for varied, lengths in ((False, ""), (True, ", lengths from an eighth up")):
        ours = results.best("trainer_core", shape, varied=varied)
        trl = results.best("trl_step", shape, TRL_VARIANTS, varied=varied)
        if ours and trl:
            ratio = ours["tokens_per_second"] / trl["tokens_per_second"]
            yield figure(f"trainer ÷ TRL step{lengths}", shape, ratio, at_least(1.5), _rate(ours), _rate(trl))
    ours = results.best("trainer_core", shape, varied=False)
    if ours is None:
        return
    rate = float(ours["tokens_per_second"])
    if plain := results.best("plain_step", shape, length=ours.get("length", 1024)):
        ratio = rate / plain["tokens_per_second"]
        yield figure("trainer ÷ plain compiled step", shape, ratio, above(1), _rate(ours), _rate(plain))
    share = mfu(SHAPES[shape], rate, int(ours.get("length", 1024)))
    target = at_least(0.5) if shape == "1.5b" else _no_target
    yield figure("trainer MFU", shape, share, target, _rate(ours), "989 TFLOP/s")


def generation(results: Results, shape: str) -> Iterator[Figure]:
    """The rollout stage beside raw SGLang, and how long weights take to arrive."""
    ours = results.newest("our_iteration", shape)
    raw = ours and results.best("raw_sglang", shape, new_tokens=ours["new_tokens"], requests=_samples(ours))
    if ours and raw:
        ratio = ours["rollout_tokens_per_second"] / raw["tokens_per_second"]
        mine = f"{ours['rollout_tokens_per_second']:,.0f} tokens/s, stage"
        yield figure("rollout stage ÷ raw SGLang", shape, ratio, at_least(0.97), mine, _rate(raw))
    for (transport, through), limit in WEIGHTS_LIMIT.items():
        if row := results.newest("weights", shape, transport=transport, through=through):
            what = f"new weights answer, {transport}{f' through {through}' if transport == 'store' else ''}, s"
            target = at_most(limit) if shape == "1.5b" else _no_target
            yield figure(what, shape, row["answered_seconds"], target, f"median of {len(row['answered'])}", "")


def iterations(results: Results, shape: str) -> Iterator[Figure]:
    """Whole iterations beside their bare parts and beside TRL's, and what the pipeline costs."""
    ours = results.newest("our_iteration", shape)
    if ours is None:
        return
    seconds = f"{ours['iteration_seconds']:.2f} s"
    bare = bare_seconds(results, ours)
    if bare is not None:
        target = at_most(BARE_LIMIT[shape]) if shape in BARE_LIMIT else _no_target
        ratio = ours["iteration_seconds"] / sum(bare)
        parts = f"{bare[0]:.2f} s SGLang + {bare[1]:.2f} s plain step"
        yield figure("iteration ÷ bare parts", shape, ratio, target, seconds, parts)
    trl = results.newest("trl_iteration", shape, samples=_samples(ours), new_tokens=ours["new_tokens"])
    if trl:
        ratio = ours["iteration_seconds"] / trl["iteration_seconds"]
        theirs = f"{trl['iteration_seconds']:.1f} s, generating through transformers (no vLLM)"
        yield figure("iteration ÷ TRL iteration", shape, ratio, at_most(0.3), seconds, theirs)
    targets = (at_most(0.05), at_most(0.02)) if shape == "1.5b" else (_no_target, _no_target)
    share, alone = ours["overhead_share"], ours["tables_and_orchestration_share"]
    yield figure("all but generation and training ÷ iteration", shape, share, targets[0], seconds, "")
    yield figure("tables and orchestration alone ÷ iteration", shape, alone, targets[1], seconds, "")


def bare_seconds(results: Results, ours: Record) -> tuple[float, float] | None:
    """Raw SGLang's time for the iteration's tokens, and the plain compiled step's; None where one was not measured."""
    raw = results.best("raw_sglang", ours["shape"], new_tokens=ours["new_tokens"], requests=_samples(ours))
    length = round(ours["mean_tokens"] / 8) * 8
    plain = results.best("plain_step", ours["shape"], length=length) or results.best("plain_step", ours["shape"])
    if raw is None or plain is None:
        return None
    return (
        ours["generated_tokens"] / raw["tokens_per_second"],
        ours["mean_tokens"] * _samples(ours) / plain["tokens_per_second"],
    )


def _no_target(value: float) -> tuple[str, bool | None]:
    return "", None


def _samples(ours: Record) -> int:
    return int(ours["groups"]) * int(ours["group_size"])


def _rate(row: Record) -> str:
    how = row.get("variant") or row.get("backend") or ""
    return f"{row['tokens_per_second']:,.0f} tokens/s{', ' if how else ''}{how}"


def markdown(found: Sequence[Figure], rows: Sequence[Record]) -> str:
    """The table, under the machine's name."""
    head = [
        f"{', '.join(sorted({r['device'] for r in rows}))} · {_span([r['date'] for r in rows])} · {_versions(rows)}",
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
    return "\n".join([*head, *lines, *(["", f"Runs: {', '.join(runs)}"] if runs else []), ""])


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
    found = figures(Results(rows))
    text = markdown(found, rows)
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "figures.md").write_text(text)
        body = {"figures": [asdict(f) for f in found], "results": rows}
        (arguments.out / "figures.json").write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
