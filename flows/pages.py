"""Rollouts as a person reads them in the Prefect UI. Texts come from models and data sets: all of it is escaped.

The UI renders markdown in tables too, so that a GSM8K answer `#### 72` would become a heading.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

CUT = 120
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>$:])")


def escape_markdown(text: str) -> str:
    """`text` so that markdown shows it as it is, on one line."""
    return _MARKUP.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def cut(text: str, length: int = CUT) -> str:
    """At most `length` characters, with … where something was left out."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def rollout_rows(samples: pa.Table, count: int) -> list[dict[str, Any]]:
    """Rows of the table artifact, taken from all over the table so that groups differ: numbers first, texts cut."""
    shown = min(count, len(samples))
    return [_row(row) for row in samples.take([i * len(samples) // shown for i in range(shown)]).to_pylist()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": None if math.isnan(row["reward"]) else round(row["reward"], 4),  # JSON knows no NaN
        "verdict": row["verdict"],
        "tokens": row["num_generated"],
        "stop": row["stop_reason"],
        "sample": row["sample_id"],
        "prompt": escape_markdown(cut(row["prompt"])),
        "completion": escape_markdown(cut(row["completion"])),
        "answer": escape_markdown(cut(row["answer"][-40:], 40)),
    }


def rollout_page(samples: pa.Table, title: str) -> str:
    """Whole rollouts worth reading: the best, the worst, the longest, and one of each kind that has no answer."""
    rows = samples.to_pylist()
    sections = [_section(heading, row) for heading, row in _worth_reading(rows)]
    return "\n\n".join([f"# {escape_markdown(title)}", *sections])


def _worth_reading(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    judged = [row for row in rows if not math.isnan(row["reward"])]
    by_reward = sorted(judged, key=lambda row: (row["reward"], row["num_generated"]))
    found = [("Best", by_reward[-1]), ("Worst", by_reward[0])] if judged else []
    found.append(("Longest", max(rows, key=lambda row: row["num_generated"])))
    for verdict, heading in (("unparseable", "No answer found"), ("timeout", "Timed out"), ("error", "Not verified")):
        found += [(heading, row) for row in rows if row["verdict"] == verdict][:1]
    return _each_once(found)


def _each_once(found: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Every sample under its headings together, in the order of the first."""
    headings: dict[str, list[str]] = {}
    for heading, row in found:
        headings.setdefault(row["sample_id"], []).append(heading)
    samples = {row["sample_id"]: row for _, row in found}
    return [(" · ".join(names), samples[sample]) for sample, names in headings.items()]


def _section(heading: str, row: dict[str, Any]) -> str:
    facts = (
        f"reward {row['reward']:g} · {row['verdict']} · tokens {row['num_generated']} · "
        f"ended by {row['stop_reason']} · version {row['version_min']} · sample {row['sample_id']}"
    )
    parts = (("Prompt", row["prompt"]), ("Completion", row["completion"]), ("Answer", row["answer"]))
    told = (*parts, ("Verifier", row["detail"])) if row["detail"] else parts
    return "\n\n".join(
        [f"## {heading}", escape_markdown(facts), *(f"**{name}**\n\n{_block(text)}" for name, text in told)]
    )


def _block(text: str) -> str:
    """An indented code block: nothing in it is markup, whatever it holds."""
    return "\n".join(f"    {line}" for line in (text or "(empty)").splitlines() or [""])
