"""The verifier `math`: the documented cases, worked solutions, and laws that hold for any answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_cases import DOCS, Case, documented_cases, worked_solution

from areal_tasks.rewards.math import verify
from areal_tasks.rewards.math.answers import read_answer
from areal_tasks.rewards.math.equal import equal

CASES = documented_cases()

#: What a data set's or a model's last line may look like.
STYLES = ("#### {}", "A: {}", "The answer is {}.", r"\boxed{{{}}}")


@pytest.mark.parametrize("case", CASES.values(), ids=[name[:60] for name in CASES])
def test_the_documented_cases(case: Case) -> None:
    verdict = verify("", case.completion, case.reference, truncated=case.truncated)
    assert (verdict.verdict, verdict.reward) == (case.verdict, float(case.verdict == "correct")), verdict
    assert verdict.parsed if case.verdict == "correct" else verdict.parsed or verdict.detail


def test_the_tables_are_read_whole() -> None:
    lines = DOCS.read_text().split("## The rule of `math`")[1].splitlines()
    rows = [line for line in lines if line.startswith("|") and "| verdict |" not in line and "| --- |" not in line]
    assert len(CASES) == len(rows) > 400
    assert {case.verdict for case in CASES.values()} == {"correct", "incorrect", "unparseable"}


@pytest.mark.parametrize("answer", ["", "  ", "#### ", r"\boxed{}"])
def test_a_reference_without_an_answer_is_an_error_of_the_data(answer: str) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        verify("", "#### 5", answer)


def test_a_reference_that_is_too_large_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match="reference answer cannot be compared: the answer has more than 1000"):
        verify("", "#### 5", "9" * 1001)


def test_thinking_that_the_prompt_opened_and_nothing_closed_is_no_answer() -> None:
    assert verify("How many?<think>\n", r"it is \boxed{5}", "5").verdict == "unparseable"
    assert verify("How many?<think>\n", r"it is 4</think>\boxed{5}", "5").verdict == "correct"


def test_an_aborted_completion_is_unfinished() -> None:
    assert verify("", "There are 5", "5", stop_reason="abort").verdict == "unparseable"
    assert verify("", "There are 5", "5", stop_reason="stop").verdict == "correct"


@given(st.decimals(-(10**9), 10**9, places=2), st.sampled_from(["{:f}", "{:,f}", "${:,f}", "{:f} apples", "${:f}$."]))
@settings(deadline=None, max_examples=50)
def test_any_number_in_any_dress_equals_itself_and_not_its_neighbour(number: Decimal, dress: str) -> None:
    written = f"I think so.\n#### {dress.format(number)}"
    assert verify("", written, f"{number:f}").verdict == "correct"
    assert verify("", written, f"{number + 1:f}").verdict == "incorrect"


@given(
    st.text(alphabet="\\boxed{}# 0123456789.,$%-+/^ab½²°\n", max_size=60),
    st.sampled_from(["5", "50%", "5 kg", r"\frac{1}{2}", "1, 2", "[0,1)", "x+1"]),
)
@settings(deadline=None, max_examples=150)
def test_any_text_has_a_verdict(text: str, reference: str) -> None:
    assert verify("", text, reference).verdict in ("correct", "incorrect", "unparseable")


ANSWERS = st.recursive(
    st.fractions(-50, 50, max_denominator=9).map(str) | st.sampled_from([r"\sqrt{2}", "x+1", "5 kg", "3%", "2:30"]),
    lambda parts: st.lists(parts, min_size=2, max_size=3).map(lambda items: f"({', '.join(items)})"),
    max_leaves=4,
)


@given(ANSWERS, ANSWERS)
@settings(deadline=None, max_examples=100)
def test_an_answer_equals_itself_and_equality_has_no_sides(first: str, second: str) -> None:
    a, b = read_answer(first), read_answer(second)
    assert equal(a, a) and equal(b, b)
    if "%" not in first + second:  # a reference with a % sign takes the share, too
        assert equal(a, b) == equal(b, a)


def test_no_alarm_is_set_and_none_is_disturbed() -> None:
    """math-verify's own time-outs use SIGALRM, which the deadline of the process replaces."""
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        verify("", r"so $\frac{3}{4} + \sqrt{x}$", r"\frac{3}{4} + \sqrt{x}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def wrong_verdicts(solutions: list[tuple[str, str]]) -> Iterator[str]:
    """Solutions that are not judged correct against themselves, or not as their numbers differ against the next one."""
    numbers = [Decimal(answer.replace(",", "")) for _, answer in solutions]
    for i, (solution, answer) in enumerate(solutions):
        following = (i + 1) % len(solutions)
        for style in STYLES:
            written = solution.removesuffix(f"#### {answer}") + style.format(answer)
            if verify("", written, solution).verdict != "correct":
                yield written
            expected = "correct" if numbers[i] == numbers[following] else "incorrect"
            if verify("", written, solutions[following][0]).verdict != expected:
                yield f"{written}\nbeside\n{solutions[following][0]}"


def test_worked_solutions_in_any_style() -> None:
    assert not list(wrong_verdicts([worked_solution(seed) for seed in range(50)]))


def test_every_gsm8k_solution_in_any_style() -> None:
    folder = os.environ.get("AREAL_TEST_GSM8K")
    if not folder:
        pytest.skip("AREAL_TEST_GSM8K does not name a folder with GSM8K's train.jsonl and test.jsonl")
    rows = [line for split in ("train", "test") for line in Path(folder, f"{split}.jsonl").read_text().splitlines()]
    answers = [json.loads(row)["answer"].strip() for row in rows]
    assert len(answers) == 7473 + 1319
    assert not list(wrong_verdicts([(answer, answer.rsplit("#### ", 1)[1]) for answer in answers]))
