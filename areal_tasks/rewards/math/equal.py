"""Compares an answer with the reference: numbers exactly, lists part by part, formulas by math-verify within bounds."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig

from areal_tasks.rewards.math.answers import Answer, Formula, Group, Quantity, TooLarge, read_answer
from areal_tasks.rewards.math.units import compatible

# The process's deadline replaces math-verify's alarm signals; math-verify warns when these are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

#: Longest formula, in characters, and largest resulting number, in bits, that sympy may evaluate.
MAX_FORMULA: Final = 400
MAX_BITS: Final = 8192
_SYMBOL_BITS: Final = 16  # an expanded power of a sum is as long as a power of a number

#: Relative distance of a decimal from a number without a finite decimal form: six digits must be right.
_SIX_DIGITS: Final = Fraction(5, 10**6)
_ROUNDING: Final = Fraction(1, 10**12)
_LATEX: Final = (
    math_verify.LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"),
    ),
)
_LARGE_BINOMIAL: Final = re.compile(r"\\(?:[dt]?binom|choose).*\d{4}|\d{4}.*\\choose")  # parsing computes it
#: Points at which formulas are compared: on both sides of 0 and of 1, so that large powers do not hide other terms.
_POINTS: Final = tuple(sympy.Rational(*point) for point in ((7, 11), (-5, 13), (23, 9), (-29, 17)))
_FACTORIALS: Final = (sympy.factorial, sympy.binomial, sympy.gamma)
#: A name and its value: `x = 5`, `f(x) = 5`, `x \in [1, 2]`; or a calculation and its result.
_NAMED: Final = re.compile(
    r"(?:(?:[^A-Za-z=]|\\[a-z]+)*|(?:\\[a-z]+\s+)?[A-Za-z]{1,3}(?:_\w)?(?:\([A-Za-z, ]*\))?)\s*"
    r"(?:(?<![<>!])=|\\in(?![a-z]))(?:.*=)?(?P<value>[^=]+)"
)


def equal(reference: Answer, found: Answer) -> bool:
    """Whether they are the same answer. TooLarge if comparing them would take too long."""
    if reference == found:
        return True
    match _unnamed(reference, found), _unnamed(found, reference):
        case Quantity() as a, Quantity() as b:
            return compatible(a.unit, b.unit) and _same_quantity(a, b)
        case Group() as a, Group() as b:
            return _same_items(a, b)
        case (Quantity() | Formula()) as a, (Quantity() | Formula()) as b:
            return compatible(a.unit, b.unit) and _same_formula(a, b)
        case (Group() | Formula()) as a, (Group() | Formula()) as b:
            return _same_formula(a, b)
        case a, b:
            return a == b


def _unnamed(answer: Answer, other: Answer) -> Answer:
    """The value of `x = 5`, if the other answer is a value, too."""
    if not isinstance(answer, Formula) or (isinstance(other, Formula) and _NAMED.fullmatch(other.latex)):
        return answer
    match = _NAMED.fullmatch(answer.latex)
    return answer if match is None else read_answer(match["value"])


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Number:
    value: Fraction
    exact: bool = True

    @property
    def decimals(self) -> int | None:
        """Digits after the point; None if the decimal form is not finite, or the value is rounded."""
        rest, twos, fives = self.value.denominator, 0, 0
        while rest % 2 == 0:
            rest, twos = rest // 2, twos + 1
        while rest % 5 == 0:
            rest, fives = rest // 5, fives + 1
        return max(twos, fives) if rest == 1 and self.exact else None


def _same_quantity(reference: Quantity, found: Quantity) -> bool:
    if _agree(_Number(reference.value), _Number(found.value)):
        return True
    share = "percent" in reference.unit and not found.unit
    return share and _agree(_Number(reference.value / 100), _Number(found.value))


def _agree(a: _Number, b: _Number) -> bool:
    """Whether they are equal, or one is the other as a decimal, rounded or truncated to six digits or more."""
    distance = abs(a.value - b.value)
    if not distance or (not (a.exact and b.exact) and distance <= _ROUNDING * abs(a.value)):
        return True
    decimal, other = (a, b) if b.decimals is None else (b, a)
    if not decimal.decimals or other.decimals is not None:
        return False
    return distance <= min(Fraction(1, 10**decimal.decimals), _SIX_DIGITS * abs(other.value))


# ── lists ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _same_items(reference: Group, found: Group) -> bool:
    kinds = {reference.brackets, found.brackets}
    if len(reference.items) != len(found.items) or not (len(kinds) == 1 or kinds in ({"", "{}"}, {"", "()"})):
        return False
    if kinds <= {"", "{}"}:
        return _same_in_any_order(reference.items, found.items)
    return all(map(equal, reference.items, found.items))


def _same_in_any_order(reference: Sequence[Answer], found: Sequence[Answer]) -> bool:
    left = list(found)
    for wanted in reference:
        index = next((i for i, item in enumerate(left) if equal(wanted, item)), None)
        if index is None:
            return False
        del left[index]
    return True


# ── formulas ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _same_formula(reference: Quantity | Group | Formula, found: Quantity | Group | Formula) -> bool:
    parsed = [_parsed(reference), _parsed(found)]
    if None in parsed or len({isinstance(expression, sympy.Eq) for expression in parsed}) > 1:
        return False
    numbers = [_number(expression) for expression in parsed]
    if numbers[0] is not None and numbers[1] is not None:
        return _agree(numbers[0], numbers[1])
    values = _values(*parsed) if all(isinstance(expression, sympy.Expr) for expression in parsed) else None
    if values is not None:
        return all(abs(a - b) <= _ROUNDING * max(abs(a), abs(b), _ROUNDING) for a, b in values)
    options = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return bool(_quietly(math_verify.verify, *parsed, **options))


def _parsed(answer: Quantity | Group | Formula) -> Any:
    """The answer as an unevaluated sympy expression; None if it cannot be parsed."""
    if isinstance(answer, Quantity):
        return sympy.Rational(answer.value.numerator, answer.value.denominator)
    if len(answer.latex) > MAX_FORMULA or _LARGE_BINOMIAL.search(answer.latex):
        raise TooLarge(f"the formula has more than {MAX_FORMULA} characters, or large binomials")
    found = _quietly(math_verify.parse, f"${answer.latex}$", _LATEX, "no_fallback", parsing_timeout=None)
    bits = _quietly(_bits, found[0]) if found else None
    if bits is not None and bits > MAX_BITS:
        raise TooLarge(f"the formula leads to numbers of more than {MAX_BITS} bits")
    return None if bits is None else found[0]


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
    names = sorted({symbol.name for expression in expressions for symbol in expression.free_symbols})
    found = []
    for point in _POINTS:
        at = {name: point + sympy.Rational(i, 7) for i, name in enumerate(names)}
        values = tuple(_quietly(_value_at, expression, at) for expression in expressions)
        if None in values:
            return None
        found.append(values)
    return found


def _value_at(expression: Any, point: Mapping[str, Any]) -> Any:
    """A complex number. ValueError if there is no value, such as at a pole."""
    value = sympy.N(expression.subs({symbol: point[symbol.name] for symbol in expression.free_symbols}), 20)
    parts = value.as_real_imag() if value.is_finite else ()
    if not parts or not all(part.is_Number for part in parts):
        raise ValueError(f"{expression} has no value at {point}")
    return value


def _number(expression: Any) -> _Number | None:
    """The value of an expression without variables; None if it is not real."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = _quietly(expression.doit)
    exact = isinstance(value, sympy.Rational)
    rational = value if exact else _quietly(lambda: sympy.Rational(sympy.N(value, 30)))
    return _Number(Fraction(int(rational.p), int(rational.q)), exact) if isinstance(rational, sympy.Rational) else None


def _bits(expression: Any) -> int:
    """An upper bound of the bits of numbers that evaluating `expression` can produce."""
    if isinstance(expression, sympy.MatrixBase):
        return sum(map(_bits, expression.flat()))
    if isinstance(expression, sympy.Rational):
        return int(expression.p).bit_length() + int(expression.q).bit_length()
    if isinstance(expression, sympy.Symbol):
        return _SYMBOL_BITS
    parts = [_bits(part) for part in getattr(expression, "args", ())]
    if isinstance(expression, (sympy.Sum, sympy.Product)):
        return parts[0] * math.prod(map(_terms, expression.limits))
    if isinstance(expression, _FACTORIALS):
        return sum(parts) << min(max(parts), MAX_BITS)
    if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer):
        return parts[0] * abs(int(expression.exp))
    if isinstance(expression, sympy.Pow) and not expression.exp.free_symbols:
        return parts[0] << min(parts[1], MAX_BITS)
    return sum(parts) + 1


def _terms(limit: sympy.Tuple) -> int:
    """The terms of a sum or product over one variable; 1 if the limits are not integers: none is computed then."""
    _, first, last = limit
    return max(1, int(last) - int(first) + 1) if first.is_Integer and last.is_Integer else 1
