"""Compares an answer with the reference: numbers exactly, lists part by part, formulas by math-verify within bounds."""

from __future__ import annotations

import logging
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.hyperbolic import HyperbolicFunction

from areal_tasks.rewards.math.answers import Answer, Formula, Group, Quantity, TooLarge, read_answer

# The process's deadline replaces math-verify's alarm signals; math-verify warns when these are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

#: Longest formula, in characters, and largest resulting number, in bits, that sympy may evaluate.
MAX_FORMULA: Final = 400
MAX_BITS: Final = 8192
_SYMBOL_BITS: Final = 16  # an expanded power of a sum is as long as a power of a number

_Math = Quantity | Group | Formula
#: Relative distance of a decimal from a number without a finite decimal form: six digits must be right.
_SIX_DIGITS: Final = Fraction(5, 10**6)
_ROUNDING: Final = Fraction(1, 10**12)
_SPELLING: Final = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_MEANING: Final = ConversionConfig(lowercase_symbols=False)
_I: Final = sympy.Symbol("i", real=True)
_LARGE_BINOMIAL: Final = re.compile(r"\\(?:[dt]?binom|choose).*\d{4}|\d{4}.*\\choose")  # parsing computes it
#: Points at which formulas are compared: on both sides of 0 and of 1, so that large powers do not hide other terms.
#: They lie on no line, so that x - y is no constant.
_POINTS: Final = tuple(sympy.Rational(*point) for point in ((7, 11), (-5, 13), (23, 9), (-29, 17)))
_CALLED: Final = r"(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]=]*\])"
#: What has a value: x, S_{10}, f(2), f'(x), E[X], |AB|, [ABC], (x,y), m\angle A, \overline{AB}, dy/dx.
_TERM: Final = (
    rf"(?:(?:m\s*)?(?:\\[a-z]+\s*)*[A-Za-z]{{1,3}}'*(?:\^\{{-1\}})?(?:_\w|_\{{[^{{}}]*\}})?\s*{_CALLED}?"
    rf"|\\(?!frac)[a-z]+(?:\s*\{{[^{{}}=]*\}})?(?:_\w|_\{{[^{{}}]*\}})?\s*(?:[a-z]\s*)?{_CALLED}?"
    rf"|\\frac\{{[A-Za-z]+\}}\{{[A-Za-z]+\}}|\|[^|=]*\||\[[^\[\]=]*\]|\([A-Za-z,\s]*\)|\\l(?:floor|ceil)[^=]*\\r(?:floor|ceil))"
)
#: A name and its value: `x = 5`, `f(x) = 5`, `x \in [1, 2]`; or a calculation and its result.
_NAMED: Final = re.compile(
    rf"(?P<name>(?:[^A-Za-z=]|\\[a-z]+)*|{_TERM}(?:\s*\+\s*{_TERM})*)\s*"
    r"(?:(?<![<>!])=|\\(?:in|approx|equiv)(?![a-z]))(?:.*=)?(?P<value>[^=]+)"
)
_VALUE_FIRST: Final = re.compile(rf"(?P<value>[^A-Za-z=]+)=\s*(?P<name>{_TERM})")


def equal(reference: Answer, found: Answer) -> bool:
    """Whether they are the same answer. TooLarge if comparing them would take too long."""
    if reference == found:
        return True
    match _unnamed(reference, found), _unnamed(found, reference):
        case Group() as a, Group() as b:
            return _same_items(a, b)
        case (Quantity() | Formula()) as a, (Quantity() | Formula()) as b:
            share = "percent" in a.unit and not b.unit
            alike = a.unit <= b.unit or b.unit <= a.unit
            return alike and (_same_formula(a, b) or (share and _same_formula(a, b, Fraction(1, 100))))
        case (Group() | Formula()) as a, (Group() | Formula()) as b:
            return _same_formula(a, b)
        case a, b:
            return a == b


def _unnamed(answer: Answer, other: Answer) -> Answer:
    """The value of `x = 5`, if the other answer is a value, or that of the same name."""
    match = _named(answer)
    theirs = _named(other)
    if match is None or (theirs is None and isinstance(other, Formula) and "=" in other.latex):
        return answer
    same = theirs is None or "".join(theirs["name"].split()) == "".join(match["name"].split())
    return read_answer(match["value"]) if same else answer


def _named(answer: Answer) -> re.Match[str] | None:
    latex = answer.latex if isinstance(answer, Formula) else ""
    return _VALUE_FIRST.fullmatch(latex) or _NAMED.fullmatch(latex)


def _same_items(reference: Group, found: Group) -> bool:
    kinds = {reference.brackets, found.brackets}
    alike = len(kinds) == 1 or kinds in ({"", "{}"}, {"", "()"}) or (kinds == {"", "[]"} and len(found.items) > 2)
    if len(reference.items) != len(found.items) or not alike:
        return False
    if not kinds <= {"", "{}"}:
        letters = [_letters(group) for group in (reference, found)]
        cased = any(len(of) > len(set(map(str.lower, of))) for of in letters)  # (R, r) is not (r, R)
        pairs = list(zip(reference.items, found.items, strict=True))
        return all(equal(a, b) and (not cased or _letters(a) == _letters(b)) for a, b in pairs)
    left = list(found.items)  # in any order
    for wanted in reference.items:
        same = next((item for item in left if equal(wanted, item)), None)
        if same is None:
            return False
        left.remove(same)
    return True


def _letters(answer: Answer) -> set[str]:
    return set(filter(str.isalpha, re.sub(r"\\[A-Za-z]+", "", getattr(answer, "latex", ""))))


def _same_formula(reference: _Math, found: _Math, unit: Fraction = Fraction(1)) -> bool:
    """Whether they have the same value, the reference in units of `unit`."""
    a, b = _parsed(reference), _parsed(found)
    if a is None or b is None or isinstance(a, sympy.Eq) is not isinstance(b, sympy.Eq):
        return False
    if isinstance(a, sympy.Eq) and a.atoms(AppliedUndef) != b.atoms(AppliedUndef):  # f(2) = 7 and f(3) = 7
        return False
    x, y = _number(a), _number(b)
    if x and y:
        return _agree(x[0] * unit, y[0], (x[1], y[1]))
    sides = [_quietly(operator.sub, *one.args) if isinstance(one, sympy.Eq) else one for one in (a, b)]
    values = _values(*sides) if all(isinstance(side, sympy.Expr) for side in sides) else None
    if values:  # the sides of equations may be in a constant ratio
        x0, y0 = values[0] if isinstance(a, sympy.Eq) and all(map(all, values)) else (1, 1)
        return all(_near(left * y0, right * x0) for left, right in values)
    options = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return bool(_quietly(math_verify.verify, a, b, **options))


def _agree(a: Fraction, b: Fraction, exact: tuple[bool, bool]) -> bool:
    """Whether they are equal, or one is the other as a decimal, rounded or truncated to six digits or more."""
    distance = abs(a - b)
    if not distance or (not all(exact) and distance <= _ROUNDING * abs(a)):
        return True
    finite = (value.denominator if known else 0 for value, known in zip((a, b), exact, strict=True))
    places = [next((k for k in range(400) if unit and 10**k % unit == 0), None) for unit in finite]  # after the point
    decimal, other = (places[0], b) if places[1] is None else (places[1], a)
    return bool(decimal and None in places and distance <= min(Fraction(1, 10**decimal), _SIX_DIGITS * abs(other)))


def _near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= _ROUNDING * max(abs(a), abs(b), _ROUNDING))


def _parsed(answer: _Math) -> Any:
    """The answer as an unevaluated sympy expression; None if it cannot be parsed."""
    if isinstance(answer, Quantity):
        return sympy.Rational(answer.value.numerator, answer.value.denominator)
    if len(answer.latex) > MAX_FORMULA or _LARGE_BINOMIAL.search(answer.latex):
        raise TooLarge(f"the formula has more than {MAX_FORMULA} characters, or large binomials")
    found, bits = _quietly(_expression, answer.latex) or (None, 0)
    if bits > MAX_BITS:
        raise TooLarge(f"the formula leads to numbers of more than {MAX_BITS} bits")
    return found


def _expression(latex: str) -> tuple[Any, int]:
    latex = normalize_latex(re.sub(r"\s*degrees\b", r"\\cdot\\frac{\\pi}{180}", latex), _SPELLING)
    found = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=_MEANING)
    return (found.xreplace({_I: sympy.I}) if _I in found.free_symbols else found), _bits(found)


def _quietly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What `function` returns; None if it raises: sympy and antlr raise many kinds of errors for invalid input."""
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except Exception:
        return None


def _values(*expressions: Any) -> list[tuple[Any, ...]] | None:
    """Their values at a few points; None if one has none. Much faster than simplifying, and as reliable."""
    names = [{symbol.name for symbol in expression.free_symbols} for expression in expressions]
    one_case = any(text.islower() or text.isupper() for text in map("".join, names))
    spell = str.lower if one_case and all(len(set(map(str.lower, of))) == len(of) for of in names) else str
    every = sorted({spell(name) for of in names for name in of})
    rows = [[_POINTS[(k + i) % 4] * (i + 1) + sympy.Rational(i, 7) for i in range(len(every))] for k in range(4)]
    at = [dict(zip(every, row, strict=True)) for row in rows]
    found = [tuple(_quietly(_value_at, expression, point, spell) for expression in expressions) for point in at]
    return None if any(None in values for values in found) else found


def _value_at(expression: Any, point: Mapping[str, Any], spell: Callable[[str], str]) -> Any:
    """A complex number. ValueError if there is no value, such as at a pole."""
    value = sympy.N(expression.subs({symbol: point[spell(symbol.name)] for symbol in expression.free_symbols}), 20)
    if not value.is_finite or not all(part.is_Number for part in value.as_real_imag()):
        raise ValueError(f"{expression} has no value at {point}")
    return value


def _number(expression: Any) -> tuple[Fraction, bool] | None:
    """The value of an expression without variables, and whether it is exact; None if it is not real."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = _quietly(expression.doit)
    exact = isinstance(value, sympy.Rational)
    rational = value if exact else _quietly(lambda: sympy.Rational(sympy.N(value, 30)))
    return (Fraction(int(rational.p), int(rational.q)), exact) if isinstance(rational, sympy.Rational) else None


def _bits(expression: Any) -> int:
    """An upper bound of the bits of numbers that evaluating `expression` can produce."""
    if isinstance(expression, sympy.Rational):
        return int(expression.p).bit_length() + int(expression.q).bit_length()
    if isinstance(expression, sympy.Symbol):
        return _SYMBOL_BITS
    limits = expression.limits if isinstance(expression, (sympy.Sum, sympy.Product)) else ()
    if any(end.is_infinite for _, *ends in limits for end in ends):  # adding it up has no bound unless it has a name
        return MAX_BITS + 1 if expression.doit().has(sympy.Sum, sympy.Product) else 1
    parts = [_bits(part) for part in getattr(expression, "flat", lambda: expression.args)()]
    if limits:
        return parts[0] * math.prod(_largest(last - first) for _, first, last in limits)
    if isinstance(expression, (sympy.factorial, sympy.binomial, sympy.gamma)):
        return sum(parts) * max(map(_largest, expression.args))
    if isinstance(expression, (sympy.Pow, sympy.exp, HyperbolicFunction)):
        return max(parts[0], 2) * _largest(expression.args[-1])
    return sum(parts) + 1


def _largest(exponent: Any) -> int:
    """An upper bound of its absolute value where variables are at most 4; 1 if it is infinite: nothing is computed."""
    if _bits(exponent) > MAX_BITS // 16:
        return MAX_BITS + 1
    value = abs(sympy.N(exponent.subs(dict.fromkeys(exponent.free_symbols, 4)), 5))
    return int(value) + 1 if value.is_finite else 1
