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


#: What is said of a value that is then no answer, in scripts without blanks; the value is written `{}`.
DENIED = (
    *(
        "答案不是{}。",
        "不是{}。",
        "答案并非{}。",
        "答えは{}ではありません。",
        "{}ではない。",
        "결과는 {}가 아닙니다.",
        "답은 {}가 아니다.",
    ),
    *(
        "答案是9或{}。",
        "答案是{}或9。",
        "所以x=9或{}。",
        "x=9または{}です。",
        "结果约为9到{}之间。",
        "所以有9到{}个。",
        "他有9分之{}。",
    ),
    *(
        "他有{}分之9。",
        "所以有9至{}个。",
        "答案是9~{}。",
        "答え:9か、または{}。",
        "答えは{}または9。",
        "결과는 9 또는 {}입니다.",
    ),
)


@pytest.mark.parametrize("sentence", DENIED)
def test_scripts_without_blanks_deny_and_offer_alternatives(sentence: str) -> None:
    for number in ("4", "-5", "2.5", "$7$"):
        completion = sentence.format(number)
        assert not judged(completion, number.strip("$")) and not judged(completion, "9"), completion


@pytest.mark.parametrize("cause", ["因为第2步", "所以第2步", "因為2+2", "因为x=2"])
def test_a_cause_in_a_script_without_blanks_is_no_value(cause: str) -> None:
    for beginning in ("答案是x=3，", "结果是3，", "x=3，"):
        assert judged(f"{beginning}{cause}。", "3") and not judged(f"{beginning}{cause}。", "2"), beginning


@pytest.mark.parametrize(
    "word",
    [
        "тысяч",
        "тысячи",
        "миллионов",
        "миллиард",
        "Millionen",
        "Milliarden",
        "millones",
        "mille",
        "tausend",
        "nghìn",
        "triệu",
        "lac",
        "Mio.",
        "Mrd.",
        "milliard",
        "mil",
        "millions",
        "million",
        "milione",
        "miljoen",
        "Dutzend",
        "docena",
        "douzaine",
        "cientos",
        "juta",
        "ribu",
        "elfu",
    ],
)
def test_multiplying_words_of_other_languages_are_no_unit(word: str) -> None:
    for number in ("12", "5"):
        for completion in (
            f"#### {number} {word}",
            rf"\boxed{{{number} \text{{ {word}}}}}",
            f"Il y en a {number} {word}",
        ):
            assert not judged(completion, number), completion


INNER = (
    "cbrt({})",
    "nCr({},3)",
    "factorial({})",
    "alpha/{}",
    "sqrt({})",
    "log({})",
    "pi/{}",
    "3 sqrt({})",
    "f({})",
    "√{}",
)


@pytest.mark.parametrize("formula", INNER)
def test_no_number_within_a_formula_is_the_answer(formula: str) -> None:
    for sentence in ("#### {}", "So we get {}.", "So it is {}.", "结果是{}。", "The answer is {}.", "{}"):
        for number in ("2", "8", "5"):
            completion = sentence.format(formula.format(number))
            assert not judged(completion, number) and not judged(completion, "3"), completion


@pytest.mark.parametrize(
    "formula",
    [
        *(r"\cosh(10^{9})", r"\sinh(10^9)", r"\tanh(10^{8})", r"\sinh(e^{20})", r"\cosh(e^{99})"),
        *(r"\sum_{n=1}^{\infty} \frac{(-1)^n}{\sqrt n}", r"\prod_{n=1}^{\infty} (1+\frac{1}{n\sqrt n})"),
    ],
)
def test_hyperbolic_functions_and_endless_sums_are_not_computed(formula: str) -> None:
    assert verify("", rf"\boxed{{{formula}}}", "1").detail.startswith("the formula leads to numbers of more than")


def test_small_hyperbolic_functions_and_known_sums_are_computed() -> None:
    assert judged(r"\boxed{\cosh(2)}", r"\frac{e^2+e^{-2}}{2}") and judged(
        r"\boxed{\sum_{n=0}^{\infty} \frac{1}{2^n}}", "2"
    )


@pytest.mark.parametrize(
    "noun", ["step", "equation", "eq.", "formula", "line", "part", "case", "figure", "table", "Step"]
)
def test_the_number_of_a_step_is_no_value(noun: str) -> None:
    for before in (", obtained in", " as we found in", ", see", " using", " from"):
        for number in ("2", "(2)"):
            completion = f"So $x = 3${before} {noun} {number}."
            assert judged(completion, "3") and not judged(completion, "2"), completion


def test_arguments_and_the_order_of_names_matter() -> None:
    for first, second in (("f(2)=7", "f(3)=7"), ("f(2)=7", "g(2)=7"), ("(R,r)", "(r,R)"), ("(a,B)", "(b,A)")):
        assert not judged(rf"\boxed{{{first}}}", second) and judged(rf"\boxed{{{first}}}", first), (first, second)


@pytest.mark.parametrize(
    "sentence", ["The answer is {}!", "So it is {}!", "答案是{}!", "Answer: {}!", "So x = {}! Great."]
)
def test_an_exclamation_mark_behind_a_number_ends_the_sentence(sentence: str) -> None:
    assert judged(sentence.format("42"), "42") and not judged(sentence.format("5"), "120")
    assert judged(r"\boxed{5!}", "120") and judged("The answer is $5!$", "120")
