"""The verifier `math` on kinds of answers: laws that hold for all of a kind, and 991 labelled cases."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_tasks.rewards.math import verify

CASES = Path(__file__).parents[1] / "fixtures" / "math_cases.jsonl"

CLOSINGS = (
    *("I hope this helps!", "I hope it is correct.", "Let me know if you have any questions.", "X marks the spot."),
    *("Note that no other value works.", "However, this assumes integers.", "Perhaps it surprises you.", "Q.E.D."),
    *("It isn't hard.", "A quick check confirms it.", "Not a hard problem.", "Instead of guessing, we computed it."),
)
#: What a completion says, and the reference.
VALUES = (("42", "42"), ("-7", "-7"), ("3.5", "7/2"), (r"$\frac{3}{8}$", "3/8"), ("$12", "12"))
LAYOUTS = (
    *(
        r"\,{}\,",
        r"\;{}\;",
        r"\ {}\ ",
        r"\!{}",
        r"\quad {} \quad",
        r"\hspace{{1mm}}{}",
        r"\text{{ }}{}",
        r"{}\checkmark",
    ),
    *(r"\mathbf{{{}}}", r"\boldsymbol{{{}}}", r"\bm{{{}}}", r"\textcolor{{red}}{{{}}}", r"\color{{red}}{{{}}}"),
    *(r"\rm {}", r"\large {}", r"\displaystyle{{{}}}", r"\underline{{{}}}", r"\text{{Answer: }}{}", r"\left.{}\right."),
)
SCRIPTS = (
    "答案是{}。",
    "所以答案为：{}。",
    r"\boxed{{{}元}}",
    "一共{}个，对吗",
    "答えは{}です。",
    "정답은 {}입니다.",
    "Ответ: {}.",
)


def judged(completion: str, answer: str) -> bool:
    return verify("", completion, answer).verdict == "correct"


def test_labelled_cases() -> None:
    """Without the choices that docs/reference/math.md documents."""
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    wrong = [case for case in cases if judged(case["completion"], case["answer"]) != case["expected"]]
    accepted = [case for case in wrong if not case["expected"]]
    assert len(cases) == 991 and not accepted, accepted
    assert len(wrong) <= 17, wrong


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_sentence_after_the_answer_does_not_hide_it(closing: str) -> None:
    for written, reference in VALUES:
        for beginning in ("The answer is {}. {}", "Final Answer: The final answer is {}. {}", "So it is {}. {}"):
            completion = beginning.format(written, closing)
            assert judged(completion, reference) and not judged(completion, "41"), completion


@given(
    st.lists(st.sampled_from(LAYOUTS), max_size=2),
    st.sampled_from(["5", r"\frac{1}{2}", "2x+1", "(1,2)", r"2\sqrt{3}"]),
)
@settings(deadline=None, max_examples=20)
def test_layout_and_style_do_not_matter(layouts: list[str], answer: str) -> None:
    written = answer
    for layout in layouts:
        written = layout.format(written)
    assert judged(rf"\boxed{{{written}}}", answer), written
    assert not judged(rf"\boxed{{{written}}}", "7"), written


@pytest.mark.parametrize("sentence", SCRIPTS)
def test_scripts_without_blanks_lose_no_sign_and_no_numerator(sentence: str) -> None:
    for number in ("12", "-5", "3/4", "-3/4", "2.5", "1,234"):
        value = Fraction(number.replace(",", ""))
        completion = sentence.format(number)
        assert judged(completion, str(value)), completion
        for other in (-value, value.denominator, abs(value.numerator) + value.denominator):
            assert value == other or not judged(completion, str(other)), (completion, other)


@pytest.mark.parametrize(
    "changed",
    ["5万元", "5百", "5亿", "5分之3", "5个半", "5 crores", "5 quadrillions", "5 score", "5 decillion", "5 bil"],
)
def test_words_that_make_another_number_are_no_unit(changed: str) -> None:
    assert not judged(rf"\boxed{{{changed}}}", "5")
    assert not judged(rf"\boxed{{5\text{{ {changed[1:]}}}}}", "5")


@pytest.mark.parametrize("letter", "hsmgLRN")
def test_letters_are_variables_with_a_case(letter: str) -> None:
    other = letter.swapcase()
    for formula in (r"\pi r^2", "3x^2"):
        assert not judged(rf"\boxed{{{formula} {letter}}}", formula)
        assert judged(rf"\boxed{{{formula} {letter}}}", f"{letter} {formula}")
    assert not judged(rf"\boxed{{{letter}-{other}}}", "0")
    assert judged(rf"\boxed{{{letter}+1}}", f"{other}+1")


@pytest.mark.parametrize(
    "formula", ["sqrt(2)", "log(5)", "sin(7)", "pi/3", "exp(4)", "ab+3", "n!/2", "arctan(6)", "xyz/8"]
)
def test_a_formula_that_begins_with_letters_is_an_answer(formula: str) -> None:
    number = formula.rstrip(")!")[-1]
    assert judged(f"#### {formula}", formula) and not judged(f"#### {formula}", number)


@given(st.integers(0, 99), st.integers(1, 99).filter(lambda n: n % 2 and n % 5))
@settings(deadline=None, max_examples=15)
def test_a_repeating_decimal_is_its_fraction(over: int, under: int) -> None:
    value = Fraction(over, under)
    period = next(k for k in range(1, 100) if (10**k - 1) % value.denominator == 0)
    digits = f"{int(value % 1 * (10**period - 1)):0{period}d}"
    for written in (rf"{int(value)}.\overline{{{digits}}}", f"{int(value)}.({digits})"):
        assert judged(rf"\boxed{{{written}}}", f"{value}"), written
        assert not judged(rf"\boxed{{{written}}}", f"{value + 1}"), written


COEFFICIENTS = st.integers(-9, 9).filter(bool)


@given(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
@settings(deadline=None, max_examples=8)
def test_equations_are_compared_up_to_a_factor(a: int, b: int, c: int, factor: int) -> None:
    reference = f"{a}x+{b}y={c}".replace("+-", "-")
    same = f"{a * factor}x+{b * factor}y+{-c * factor}=0".replace("+-", "-")
    other = f"{a * factor}x+{b * factor}y+{1 - c * factor}=0".replace("+-", "-")
    assert judged(rf"\boxed{{{same}}}", reference) and not judged(rf"\boxed{{{other}}}", reference)


@given(COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
@settings(deadline=None, max_examples=5)
def test_complex_arithmetic(a: int, b: int, c: int, d: int) -> None:
    product = f"{a * c - b * d}+{a * d + b * c}i".replace("+-", "-")
    assert judged(rf"\boxed{{({a}+{b}i)({c}+{d}i)}}".replace("+-", "-"), product)
    assert not judged(rf"\boxed{{({a}+{b}i)({c}+{d}i)+1}}".replace("+-", "-"), product)


@pytest.mark.parametrize(
    "name", ["(x,y)", "f(2)", "S_{10}", "|S|", "E[X]", r"\overline{AB}", "[ABC]", "f'(3)", "P(X=2)", "x_1"]
)
def test_a_named_value_is_its_value(name: str) -> None:
    value = "(3,4)" if name == "(x,y)" else "17"
    assert judged(rf"\boxed{{{name}={value}}}", value) and judged(rf"\boxed{{{value}}}", f"{name} = {value}")
    assert not judged(rf"\boxed{{{name}={value}}}", "2") and not judged(rf"\boxed{{{name}={value}}}", "10")


@pytest.mark.parametrize(
    "tower", ["e^{e^{100}}", "2^{e^{e^{9}}}", r"\exp(\exp(99))", "e^{e^{e^{e^x}}}", "2^{20!}", "e^{10^{99}}"]
)
def test_towers_of_exponents_are_not_computed(tower: str) -> None:
    assert verify("", rf"\boxed{{{tower}}}", "1").detail.startswith("the formula leads to numbers of more than")


def test_points_of_comparison_lie_on_no_line() -> None:
    for formula in ("x-y", "x-2y+z", "a+b+c+d"):
        for constant in ("0", r"-\frac{1}{7}", r"\frac{2}{7}"):
            assert not judged(rf"\boxed{{{formula}=3}}", f"{formula}=5") and not judged(
                rf"\boxed{{{formula}}}", constant
            )
