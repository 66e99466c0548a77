"""The page: a template, a style sheet, a script and the data in one file that loads nothing.

The data is bounded in bytes: first the curves and facts, then as many samples as fit.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from areal_tasks.report.cost import cost_facts, cost_of, stage_rows, time_payload, time_spent
from areal_tasks.report.curves import CHARTS, curves
from areal_tasks.report.facts import code_and_hosts, differences, dropped_prompts, run_facts, utc_text
from areal_tasks.report.samples import choose_samples, count_samples, encode_sample, read_samples
from areal_tasks.report.tokens import vocabulary
from areal_tasks.store.backend import Store
from areal_tasks.store.provenance import now
from areal_tasks.store.query import Session
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError

POINTS: Final = 600  # per line, for one run; several runs share them
FEWEST_POINTS: Final = 100

#: The modules of the script; each uses only earlier ones.
MODULES: Final = (
    *("dom.js", "format.js", "data.js", "scales.js", "chart.js", "stack.js", "curves.js", "facts.js", "tokens.js"),
    *("detail.js", "filters.js", "rollouts.js", "main.js"),
)

_IMPORT: Final = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")

Payload = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """The page's data, and the number of samples in it and in the runs."""

    payload: Payload
    embedded: int  # samples in the page
    available: int  # samples of the runs


def make_report(store: Store, names: Sequence[str], samples: int, max_bytes: int) -> Report:
    """The data of a page about these runs of at most `max_bytes`, with up to `samples` samples of each.

    Raises UserError: a run is named twice or does not exist, a shard that the curves or the choice of samples need is
    damaged, or not even the curves fit.
    """
    if len(set(names)) < len(names):
        raise UserError(f"Each run once: {', '.join(names)}.")
    points = max(FEWEST_POINTS, POINTS // len(names))
    runs = [_run_data(load_run(store, name), points, samples) for name in names]
    page = {"made": utc_text(now()), "charts": [chart.__dict__ for chart in CHARTS]}
    payload: Payload = {**page, "differences": differences(runs), "runs": runs}
    _fit(payload, max_bytes)
    return Report(payload, sum(len(run["samples"]) for run in runs), sum(run["available"] for run in runs))


def _run_data(run: Run, points: int, samples: int) -> Payload:
    nothing: Payload = {
        "cost": None,
        "time": None,
        "curves": {},
        "samples": [],
        "vocabulary": {},
        "available": 0,
        "problems": [],
    }
    head = run.head()
    if head is None:
        return run_facts(run, None, {}) | nothing
    with Session(run.store, run.name) as session:
        makers, dropped, cost = session.ask(lambda c: (code_and_hosts(c), dropped_prompts(c), cost_of(c, run.name)))
        spent = session.ask(time_spent)
        lines, picked, count = session.ask(lambda c: (curves(c, points), choose_samples(c, samples), count_samples(c)))
        rows, problems = read_samples(session, picked)
    facts = run_facts(run, head, makers)
    facts["facts"] += dropped
    encoded = [encode_sample(key, row, picked[key]) for key, row in rows]
    texts, problem = vocabulary(run, {i for sample in encoded for i in sample["tokens"]["ids"]})
    samples_found = {"available": count, "problems": [*problems, *([problem] if problem else [])]}
    return facts | {
        "cost": {"facts": cost_facts(cost), "stages": stage_rows(cost)},
        "time": time_payload(spent, int(facts["recipe"].get("rollout.max_head_offpolicyness", 0))),
        "curves": lines,
        "samples": encoded,
        "vocabulary": texts,
        **samples_found,
    }


def _fit(payload: Payload, max_bytes: int) -> None:
    """Drop samples from the end of each run's list, and token texts that only they use, until the page fits."""
    everything = [(run, run["samples"], run["vocabulary"]) for run in payload["runs"]]
    for run, _, _ in everything:
        run["samples"], run["vocabulary"] = [], {}
    left = max_bytes - _bytes_of(payload)
    if left < 0:
        raise UserError(
            f"The curves and facts alone take {-left} bytes more than the {max_bytes} there is room for: "
            "raise --max-mb, or report fewer runs."
        )
    for run, samples, texts in everything:
        room = left // len(everything)
        for sample in samples:
            new = {i: texts[i] for i in set(sample["tokens"]["ids"]) - run["vocabulary"].keys() if i in texts}
            room -= _bytes_of(sample) + _bytes_of(new) + 2
            if room < 0:
                break
            run["samples"].append(sample)
            run["vocabulary"] |= new


def _bytes_of(value: Any) -> int:
    return len(to_json(value).encode())


def to_json(value: Any) -> str:
    """JSON without characters that HTML may interpret as markup, or an old script engine as a line end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def make_page(store: Store, names: Sequence[str], samples: int, max_bytes: int) -> tuple[str, Report]:
    """The HTML of the report on these runs, at most `max_bytes` long, and its data. UserError: see `make_report`."""
    frame = len(render(" · ".join(names), "").encode())
    report = make_report(store, names, samples, max_bytes - frame)
    return render(" · ".join(names), to_json(report.payload)), report


def render(title: str, data: str) -> str:
    """The whole page around `data`, which is JSON without markup (`to_json`)."""
    script, style = bundle(), _asset("style.css")
    slots = {
        "title": html.escape(title),
        "policy": policy(script, style),
        "style": style,
        "script": script,
        "data": data,
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _asset("page.html"))


def bundle() -> str:
    """The modules as one script: without imports and exports, in a scope of its own."""
    bodies = [_EXPORT.sub("", _IMPORT.sub("", _asset(name))) for name in MODULES]
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "})();\n"


def policy(script: str, style: str) -> str:
    """A Content-Security-Policy that allows this script and this style sheet, and nothing else: no network."""
    return (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _asset(name: str) -> str:
    return files("areal_tasks.report").joinpath("assets", name).read_text(encoding="utf-8")
