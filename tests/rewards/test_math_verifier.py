"""Mathematical answers in the forms that data sets and models write them."""

from __future__ import annotations

import json
import os
import signal
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.rewards.math import marked_answer, plain_number, verify

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"

CORRECT = [
    ("#### 72", SOLUTION),
    (SOLUTION, SOLUTION),
    (r"so \boxed{72}", SOLUTION),
    (r"\boxed{72 \text{ clips}}", SOLUTION),
    ("48 + 24 = 72. The answer is 72.", SOLUTION),
    ("She sold 48 in April and 24 in May, 72 in all", SOLUTION),
    ("####72", "72"),
    ("#### 72.", "72"),
    ("#### 72 clips.", "72"),
    ("#### **72**", "72"),
    ("**#### 72**", "72"),
    ("#### $72$", "72"),
    ("#### 72\n\n", "72"),
    ("#### 1,000", "1000"),
    ("#### 1000", "#### 1,000"),
    ("#### $1,234,567.50", "1234567.5"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{\$18}", "18"),
    ("#### $18", "18"),
    ("#### 18 dollars", "18"),
    ("#### -3", "-3"),
    ("#### -$3", "-3"),
    ("#### $-3", "-3"),
    ("#### − 3".replace(" 3", "3"), "-3"),
    ("#### 2.50", "2.5"),
    ("#### .5", "0.5"),
    ("#### 1/2", "0.5"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    ("#### 50%", "50"),
    ("so $x = 7$", "7"),
    ("#### 5\nNo: #### 6", "6"),
    (r"\boxed{5} or rather \boxed{6}", "6"),
    ("\\boxed{5}\n#### 6", "6"),
    ("#### 5\nso \\boxed{6}", "6"),
    ("#### 6\n#### ", "6"),
    (r"\boxed{6} and \boxed{7", "6"),
]
INCORRECT = [
    ("#### 71", SOLUTION),
    ("#### 48", SOLUTION),
    ("#### 72\n#### 24", SOLUTION),
    (r"72 is wrong, \boxed{24}", "72"),
    ("#### 3", "-3"),
    ("#### -3", "3"),
    ("#### 10", "1000"),
    ("#### 1,0000", "10"),
    ("#### 2.5", "25"),
    ("#### 720", "72"),
    (r"\boxed{abc}", "5"),
    (r"\boxed{1/0}", "1"),
    (r"\boxed{x+1}", "(x+1)^2"),
]
UNPARSEABLE = ["", "I do not know", "####", r"\boxed{", r"\boxed{}", "#### \n", "so the result is"]


@pytest.mark.parametrize(("completion", "answer"), CORRECT)
def test_correct(completion: str, answer: str) -> None:
    verdict = verify("", completion, answer)
    assert (verdict.verdict, verdict.reward) == ("correct", 1.0), verdict
    assert verdict.parsed


@pytest.mark.parametrize(("completion", "answer"), INCORRECT)
def test_incorrect(completion: str, answer: str) -> None:
    verdict = verify("", completion, answer)
    assert (verdict.verdict, verdict.reward) == ("incorrect", 0.0), verdict


@pytest.mark.parametrize("completion", UNPARSEABLE)
def test_unparseable(completion: str) -> None:
    verdict = verify("", completion, "5")
    assert (verdict.verdict, verdict.reward) == ("unparseable", 0.0), verdict
    assert verdict.detail


@pytest.mark.parametrize("answer", ["", "  ", "#### "])
def test_a_reference_without_an_answer_is_an_error_of_the_data(answer: str) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        verify("", "#### 5", answer)


@given(st.decimals(-(10**9), 10**9, places=2), st.sampled_from(["{:f}", "{:,f}", "${:,f}", "{:f} apples", "${:f}$."]))
@settings(deadline=None, max_examples=50)
def test_any_number_in_any_dress_equals_itself_and_not_its_neighbour(number: Decimal, dress: str) -> None:
    written = f"I think so.\n#### {dress.format(number)}"
    assert verify("", written, f"{number:f}").verdict == "correct"
    assert verify("", written, f"{number + 1:f}").verdict == "incorrect"


@given(st.text(alphabet=r"\boxed{}# 0123456789.,$%-+/^ab" + "\n", max_size=60))
@settings(deadline=None, max_examples=60)
def test_any_text_has_a_verdict(text: str) -> None:
    assert verify("", text, "5").verdict in ("correct", "incorrect", "unparseable")


def test_pieces() -> None:
    assert marked_answer(r"\boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert marked_answer("no mark") is None
    assert plain_number("$1,234.5 per day") == Decimal("1234.5")
    assert plain_number("1 + 1") is None and plain_number("12 or 13") is None and plain_number("1,23") is None


def test_no_alarm_is_set_and_none_is_disturbed() -> None:
    """math-verify's own time-outs use SIGALRM, which the deadline of the process replaces."""
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        verify("", r"so $\frac{3}{4}$", "0.75")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_gsm8k_solutions_are_their_own_correct_answers() -> None:
    folder = os.environ.get("AREAL_TEST_GSM8K")
    if not folder:
        pytest.skip("AREAL_TEST_GSM8K does not name a folder with GSM8K's test.jsonl")
    answers = [json.loads(line)["answer"] for line in Path(folder, "test.jsonl").read_text().splitlines()]
    assert len(answers) == 1319
    assert all(verify("", answer, answer).verdict == "correct" for answer in answers)
    numbers = [marked_answer(answer) for answer in answers]
    for answer, following, number, other in zip(answers, answers[1:], numbers, numbers[1:], strict=False):
        expected = "correct" if plain_number(number or "") == plain_number(other or "") else "incorrect"
        assert verify("", following, answer).verdict == expected
