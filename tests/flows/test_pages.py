"""Rollouts as artifacts: whatever a model or a data set wrote, it is shown as text."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from flows.observe import READ
from flows.pages import escape_markdown, rollout_page, rollout_rows

NASTY = [
    *("#### 72", "# a\n# b", "| a | b |\n|---|---|", "```\ncode\n# out", "<script>x</script>", "[x](http://y)"),
    *("- a\n1. b", "\n\n# late", "\t# tab", "a  \r\n# b", "$x$ **b** _i_ ~~s~~ &amp;", "    \n---\n", ""),
    *("\u2028# sep", "\x0b# tab"),
]
ALPHABET = "#|`~*_-+=<>[]()!\\&$:. \n\r\t1ab\u2028\x0b\x85"
texts = st.one_of(st.sampled_from(NASTY), st.text(alphabet=ALPHABET, max_size=30))


def sample(i: int, **changes: Any) -> dict[str, Any]:
    row = {"sample_id": f"{i}-0", "group_id": i, "sample_index": 0, "num_generated": i, "stop_reason": "stop"}
    judged = {"version_min": 0, "version_max": 0, "reward": float(i), "verdict": "correct", "detail": ""}
    return row | judged | {"prompt": "p", "completion": "c", "answer": "a"} | changes


def table(*rows: dict[str, Any]) -> pa.Table:
    assert set(READ) <= rows[0].keys(), "the artifacts read another column"
    return pa.Table.from_pylist(list(rows))


def parse(markdown: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)


@settings(max_examples=60, deadline=None)
@given(texts, texts, texts)
def test_texts_on_a_page_are_code_and_nothing_else(prompt: str, completion: str, answer: str) -> None:
    tokens = parse(rollout_page(table(sample(1, prompt=prompt, completion=completion, answer=answer)), "it"))
    kinds = {token.type for token in tokens}
    assert kinds <= {f"{kind}_{end}" for kind in ("heading", "paragraph") for end in ("open", "close")} | {
        "inline",
        "code_block",
    }
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1", "h2"]


@settings(max_examples=60, deadline=None)
@given(texts)
def test_an_escaped_text_is_one_paragraph_of_plain_text(text: str) -> None:
    tokens = parse(escape_markdown(text))
    assert [t.type for t in tokens] in ([], ["paragraph_open", "inline", "paragraph_close"])
    children = [child for token in tokens for child in token.children or []]
    assert {child.type for child in children} <= {"text", "text_special"}
    assert "".join(child.content for child in children) == " ".join(text.split())


def test_a_reward_that_could_not_be_judged_is_no_number() -> None:
    rows = [sample(1, reward=0.25), sample(2, reward=math.nan, verdict="timeout"), sample(3, reward=0.75)]
    found = rollout_rows(table(*rows), 3)
    assert [row["reward"] for row in found] == [0.25, None, 0.75]
    json.dumps(found, allow_nan=False)


def test_versions_are_shown_where_a_sample_is_older_than_what_it_trains() -> None:
    fresh, older = sample(1, version_min=4, version_max=4), sample(2, version_min=2, version_max=3)
    assert [row["versions"] for row in rollout_rows(table(fresh, older), 2, 4)] == ["4", "2–3"]
    assert "version 2–3 ·" in rollout_page(table(older), "it").replace("\\", "")
    for rows, trained in (((fresh, fresh), 4), ((fresh, older), None)):
        assert not any("versions" in row for row in rollout_rows(table(*rows), 2, trained))
    empty = sample(0, version_min=-1, version_max=-1)
    assert "versions" not in rollout_rows(table(empty), 1, 4)[0]


def test_the_page_begins_with_how_old_the_samples_are_where_some_are_older() -> None:
    rows = [*(sample(i, version_min=4) for i in range(1, 4)), sample(4, version_min=2), sample(0, version_min=-1)]
    bars = (
        sections(rollout_page(table(*rows), "it", 4))["Samples by the lag of their oldest token"].strip().splitlines()
    )
    assert [line.split()[:3] for line in bars] == [["lag", "0", "3"], ["lag", "2", "1"]]
    assert [line.count("█") for line in bars] == [50, 17]
    assert all("lag" not in rollout_page(table(sample(1, version_min=4)), "it", trained) for trained in (4, None))


def sections(page: str) -> dict[str, str]:
    """What stands under each heading of a page."""
    parts = [part.partition("\n") for part in page.split("\n## ")[1:]]
    return {heading: text for heading, _, text in parts}


def test_the_page_shows_the_best_the_worst_and_what_was_not_judged() -> None:
    rows = [sample(i, reward=math.nan, verdict="timeout") if i == 2 else sample(i, reward=0.25 * i) for i in range(5)]
    found = sections(rollout_page(table(*rows), "it"))
    assert list(found) == ["Best · Longest", "Worst", "Timed out"]
    assert "reward 1 " in found["Best · Longest"] and "reward 0 " in found["Worst"] and "2\\-0" in found["Timed out"]


def test_a_page_of_samples_none_of_which_could_be_judged() -> None:
    rows = [sample(i, reward=math.nan, verdict="error", detail="boom") for i in range(1, 3)]
    assert list(sections(rollout_page(table(*rows), "it"))) == ["Longest", "Not verified"]
