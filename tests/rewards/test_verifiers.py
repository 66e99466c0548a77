"""The exact verifier, what a verifier may return, and how its name in a recipe is resolved."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.rewards.exact import verify
from areal_tasks.rewards.load import load_verifier
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.rewards.protocol import FLOAT32_MAX, VERDICTS, Row, Verdict, as_verdict
from schemas import tables
from schemas.errors import UserError
from schemas.recipe.sections import Reward

EXAMPLE = Path(__file__).with_name("example_reward.py")
DOCS = Path(__file__).parents[2] / "docs" / "guides" / "reward.md"


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [("19", "correct"), (" 19\n", "correct"), ("91", "incorrect"), ("19 ", "correct"), ("19.", "incorrect"),
     ("", "unparseable"), (" \n", "unparseable")],
)  # fmt: skip
def test_exact(completion: str, verdict: str) -> None:
    found = verify("3+5+9+2=", completion, "19")
    assert found.verdict == verdict and found.reward == float(verdict == "correct")
    assert found.parsed == completion.strip()


def test_verdicts_are_those_of_the_table() -> None:
    assert VERDICTS == tables.VERDICTS


@pytest.mark.parametrize(
    "number",
    [1, 0.25, True, Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.int64(2), np.bool_(True), torch.tensor(2)],
)
def test_a_positive_number_of_any_kind_is_a_correct_verdict(number: Any) -> None:
    verdict = as_verdict(number)
    assert verdict == Verdict(float(number), "correct") == Verdict(number, "correct")
    assert type(verdict.reward) is type(Verdict(number, "correct").reward) is float


@pytest.mark.parametrize("number", [0, -1.5, False])
def test_any_other_number_is_an_incorrect_verdict(number: Any) -> None:
    assert as_verdict(number) == Verdict(float(number), "incorrect")


@pytest.mark.parametrize("answer", [None, "1", (1.0, "correct"), {"reward": 1}, 1j, np.complex64(1), np.str_("1")])
def test_anything_else_is_refused(answer: Any) -> None:
    with pytest.raises(TypeError, match="must return a Verdict or a number"):
        as_verdict(answer)
    with pytest.raises(TypeError, match="reward must be a number"):
        Verdict(answer, "correct")


@given(st.floats() | st.integers(-(10**400), 10**400))
def test_a_reward_is_kept_or_refused_with_a_remedy(number: float) -> None:
    if -FLOAT32_MAX <= number <= FLOAT32_MAX:
        assert np.isfinite(np.float32(Verdict(number, "correct").reward))
    else:
        with pytest.raises(ValueError, match="not a finite number that float32 can hold: scale your rewards"):
            Verdict(number, "correct")


@pytest.mark.parametrize(("reward", "verdict"), [(float("nan"), "correct"), (float("inf"), "correct"), (1.0, "right")])
def test_a_verdict_checks_itself(reward: float, verdict: Any) -> None:
    with pytest.raises(ValueError, match=r"is none of correct|is not a finite number"):
        Verdict(reward, verdict)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("maths", {}, "reward.verifier: 'maths' is none of math, exact, nor `package.module:object`."),
        (":f", {}, "nor `package.module:object`"),
        ("example_reward:", {}, "nor `package.module:object`"),
        ("no_such_package.rewards:f", {}, "there is no module 'no_such_package'. Install it, or set PYTHONPATH"),
        ("areal_tasks.rewards.no_such:f", {}, "there is no module 'areal_tasks.rewards.no_such'"),
        ("example_reward:tag", {}, r"example_reward \(.*example_reward.py\) has no 'tag'"),
        ("misbehaving:NOT_CALLABLE", {}, "is a int, which is not callable"),
        (
            "fails_on_import:f",
            {},
            "importing fails_on_import fails with ZeroDivisionError: division by zero. Try: python",
        ),
        ("misbehaving:takes_two", {}, "takes_two.*does not fit: too many positional arguments"),
        ("example_reward:tagged", {"case": 1}, r"unexpected keyword argument 'case'.*reward.arguments \(case\)"),
        ("exact", {"tolerance": 1}, "exact.*unexpected keyword argument 'tolerance'"),
    ],
)
def test_a_name_that_cannot_be_resolved_says_why(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_verifier(name, arguments)


def test_built_in_and_own_verifiers_with_arguments() -> None:
    assert load_verifier("exact", {})(Row("", "4", "4")) == Verdict(1.0, "correct", "4")
    strict = load_verifier("example_reward:tagged", {"ignore_case": False})
    assert strict(Row("", "<answer>Paris</answer>", "paris")) == Verdict(0.5, "incorrect", "Paris")


@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        ("misbehaving:takes_more", {}, "False length"),
        ("misbehaving:takes_more", {"truncated": "mine"}, "mine length"),  # the recipe's own argument of that name
        ("misbehaving:old_signature", {}, "{}"),
        ("misbehaving:old_signature", {"strict": True}, "{'strict': True}"),
    ],
)
def test_a_verifier_is_given_how_the_completion_ended_if_it_has_a_parameter_for_it(
    name: str, arguments: dict[str, Any], given: str
) -> None:
    verdict = load_verifier(name, arguments)(Row("", "", "", False, "length"))
    assert isinstance(verdict, Verdict) and verdict.parsed == given


def test_how_a_completion_ended_reaches_a_verifier_through_the_pool() -> None:
    rows = [Row("", "There are 5", "5", True, "length"), Row("", "There are 5", "5", False, "stop")]
    with VerifierPool(Reward(workers=1)) as pool:
        assert [result.verdict for result in pool.verify(rows)] == ["unparseable", "correct"]


def test_modules_are_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def f(prompt, completion, answer):\n    return 0.5\n")
    code = (
        "from areal_tasks.rewards.pool import VerifierPool\n"
        "from areal_tasks.rewards.protocol import Row\n"
        "from schemas.recipe.sections import Reward\n"
        "with VerifierPool(Reward(verifier='only_here:f')) as pool:\n"
        "    print(pool.verify([Row('', '', '')])[0].reward)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "0.5\n" and not ran.stderr


def test_the_example_in_a_real_pool() -> None:
    rows = [
        Row("", text, "Paris")
        for text in ("<answer>PARIS</answer>", "<answer>Rome</answer>", "Paris", "<answer> paris ")
    ]
    with VerifierPool(Reward(verifier="example_reward:tagged", workers=1, unparseable_reward=-1)) as pool:
        results = pool.verify(rows)
    assert [(r.reward, r.verdict) for r in results] == [
        (1.0, "correct"), (0.5, "incorrect"), (-1.0, "unparseable"), (-1.0, "unparseable")
    ]  # fmt: skip


def test_the_docs_quote_the_example_verbatim_and_it_is_short() -> None:
    source = EXAMPLE.read_text()
    assert f"```python\n{source}```" in DOCS.read_text()
    assert len(source.splitlines()) <= 30


def test_the_docs_name_the_fields_and_verdicts_that_exist() -> None:
    text = DOCS.read_text()
    assert set(re.findall(r"`reward\.(\w+)`", text)) == set(Reward.model_fields)
    for word in (*VERDICTS, *(field.name for field in dataclasses.fields(Verdict))):
        assert f"`{word}`" in text
