"""Rollouts as a person reads them in the Prefect UI. Texts come from models and data sets: all of it is escaped.

The UI renders markdown in tables too, so that a GSM8K answer `#### 72` would become a heading.
"""

from __future__ import annotations

import html
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
    """Rows of the table artifact: numbers first, texts cut."""
    return [_row(row) for row in samples.slice(0, count).to_pylist()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": round(row["reward"], 4),
        "verdict": row["verdict"],
        "tokens": row["num_generated"],
        "stop": row["stop_reason"],
        "sample": row["sample_id"],
        "prompt": escape_markdown(cut(row["prompt"])),
        "completion": escape_markdown(cut(row["completion"])),
        "answer": escape_markdown(cut(row["answer"][-40:], 40)),
    }


def rollout_page(samples: pa.Table, where: str) -> str:
    """Whole rollouts worth reading: the best, the worst, the longest, and what could not be judged."""
    rows = samples.to_pylist()
    sections = [_section(title, row) for title, row in _worth_reading(rows)]
    return "\n\n".join([f"# Rollouts: {escape_markdown(where)}", *sections])


def _worth_reading(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    by_reward = sorted(rows, key=lambda row: (row["reward"], row["num_generated"]))
    unjudged = [row for row in rows if row["verdict"] in ("unparseable", "timeout", "error")]
    found = [("Best", by_reward[-1]), ("Worst", by_reward[0]), ("Longest", max(rows, key=lambda r: r["num_generated"]))]
    return [*found, *(("Not judged", row) for row in unjudged[:1])]


def _section(title: str, row: dict[str, Any]) -> str:
    facts = (
        f"sample {row['sample_id']} · reward {row['reward']:g} · {row['verdict']} · "
        f"{row['num_generated']} tokens · {row['stop_reason']} · version {row['version_min']}"
    )
    parts = (("Prompt", row["prompt"]), ("Completion", row["completion"]), ("Answer", row["answer"]))
    return "\n\n".join(
        [f"## {title}", escape_markdown(facts), *(f"**{name}**\n\n{_block(text)}" for name, text in parts)]
    )


def _block(text: str) -> str:
    """An indented code block: nothing in it is markup, whatever it holds."""
    return "\n".join(f"    {line}" for line in (text or "(empty)").splitlines() or [""])
