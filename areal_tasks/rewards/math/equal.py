"""Compares an answer with the reference: numbers exactly, lists part by part, formulas by math-verify within bounds."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And

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
_SPELLING: Final = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_MEANING: Final = ConversionConfig(lowercase_symbols=False)
_I: Final = sympy.Symbol("i", real=True)
_DEGREES: Final = re.compile(r"\s*degrees\b\.?")
_LARGE_BINOMIAL: Final = re.compile(r"\\(?:[dt]?binom|choose).*\d{4}|\d{4}.*\\choose")  # parsing computes it
#: Points at which formulas are compared: on both sides of 0 and of 1, so that large powers do not hide other terms.
_POINTS: Final = tuple(sympy.Rational(*point) for point in ((7, 11), (-5, 13), (23, 9), (-29, 17)))
_FACTORIALS: Final = (sympy.factorial, sympy.binomial, sympy.gamma)
_CALLED: Final = r"(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]=]*\])"
#: What has a value: x, S_{10}, f(2), f'(x), E[X], |AB|, [ABC], (x,y), m\angle A, \overline{AB}, dy/dx.
_TERM: Final = (
    rf"(?:(?:m\s*)?(?:\\[a-z]+\s*)*[A-Za-z]{{1,3}}'*(?:\^\{{-1\}})?(?:_\w|_\{{[^{{}}]*\}})?\s*{_CALLED}?"
    rf"|\\(?!frac)[a-z]+(?:\s*\{{[^{{}}=]*\}})?(?:_\w|_\{{[^{{}}]*\}})?\s*(?:[a-z]\s*)?{_CALLED}?|\\frac\{{[A-Za-z]+\}}\{{[A-Za-z]+\}}"
    rf"|\|[^|=]*\||\[[^\[\]=]*\]|\([A-Za-z,\s]*\)|\\l(?:floor|ceil)[^=]*\\r(?:floor|ceil))"
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


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decimals(value: Fraction) -> int | None:
    """Digits after the point; None if the decimal form is not finite."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _same_quantity(reference: Quantity, found: Quantity) -> bool:
    share = "percent" in reference.unit and not found.unit
    return _agree(reference.value, found.value) or (share and _agree(reference.value / 100, found.value))


def _agree(a: Fraction, b: Fraction, exact: tuple[bool, ...] = (True, True)) -> bool:
    """Whether they are equal, or one is the other as a decimal, rounded or truncated to six digits or more."""
    distance = abs(a - b)
    if not distance or (not all(exact) and distance <= _ROUNDING * abs(a)):
        return True
    places = [_decimals(value) if is_exact else None for value, is_exact in zip((a, b), exact, strict=True)]
    decimal, other = (places[0], b) if places[1] is None else (places[1], a)
    if not decimal or None not in places:
        return False
    return distance <= min(Fraction(1, 10**decimal), _SIX_DIGITS * abs(other))


# ── lists ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _same_items(reference: Group, found: Group) -> bool:
    kinds = {reference.brackets, found.brackets}
    alike = len(kinds) == 1 or kinds in ({"", "{}"}, {"", "()"}) or (kinds == {"", "[]"} and len(found.items) > 2)
    if len(reference.items) != len(found.items) or not alike:
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
    parsed = _same_case(_same_shape([(answer, _parsed(answer)) for answer in (reference, found)]))
    if None in parsed or len({isinstance(expression, sympy.Eq) for expression in parsed}) > 1:
        return False
    if isinstance(parsed[0], sympy.Eq):
        return _same_equation(*parsed)
    numbers = [_number(expression) for expression in parsed]
    if numbers[0] is not None and numbers[1] is not None:
        return _agree(numbers[0][0], numbers[1][0], (numbers[0][1], numbers[1][1]))
    values = _values(*parsed) if all(isinstance(expression, sympy.Expr) for expression in parsed) else None
    if values is not None:
        return all(map(_near, *zip(*values, strict=True)))
    parsed = [_quietly(_region, expression) or expression for expression in parsed] if _comparable(*parsed) else parsed
    options = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return bool(_quietly(math_verify.verify, *parsed, **options))


def _near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= _ROUNDING * max(abs(a), abs(b), _ROUNDING))


def _same_equation(reference: sympy.Eq, found: sympy.Eq) -> bool:
    """Whether the differences of the two sides are in a constant ratio."""
    values = _values(*(_quietly(lambda eq=eq: eq.lhs - eq.rhs) for eq in (reference, found)))
    if values is None or not all(all(pair) for pair in values):
        return bool(_quietly(math_verify.verify, reference, found, timeout_seconds=None, raise_on_error=True))
    return all(_near(a / b, values[0][0] / values[0][1]) for a, b in values)


def _comparable(a: Any, b: Any) -> bool:
    """Not of two variables."""
    return not (a.free_symbols and b.free_symbols) or bool(a.free_symbols == b.free_symbols)


def _region(expression: Any) -> Any:
    """The set that inequalities of one variable describe, else None; several are alternatives."""
    parts = expression.args if isinstance(expression, sympy.FiniteSet) else [expression]
    parts = [sympy.And(*part._unsorted_args) if isinstance(part, And) else part for part in parts]
    if len(expression.free_symbols) != 1 or not all(
        isinstance(part, (sympy.And, sympy.core.relational.Relational)) for part in parts
    ):
        return None
    return sympy.Or(*parts).as_set()


def _same_shape(answers: list[tuple[Quantity | Group | Formula, Any]]) -> list[Any]:
    """The expressions; a point beside a vector is one."""
    shapes = [parsed.shape for _, parsed in answers if isinstance(parsed, sympy.MatrixBase)]
    return [
        sympy.Matrix(*shapes[0], [_parsed(item) for item in answer.items])
        if isinstance(answer, Group) and shapes and math.prod(shapes[0]) == len(answer.items)
        else parsed
        for answer, parsed in answers
    ]


def _same_case(parsed: list[Any]) -> list[Any]:
    """The expressions, one of them in the other's case, if all variables that differ differ in case, in one direction."""
    if None in parsed:
        return parsed
    names = [{symbol.name for symbol in expression.free_symbols} for expression in parsed]
    left, right = names[0] - names[1], names[1] - names[0]
    for here, there in ((left, right), (right, left)):
        if here and all(name.isupper() for name in here) and {name.lower() for name in here} == there:
            return [
                e.xreplace({s: sympy.Symbol(s.name.lower(), real=True) for s in e.free_symbols if s.name in here})
                for e in parsed
            ]
    return parsed


def _parsed(answer: Quantity | Group | Formula) -> Any:
    """The answer as an unevaluated sympy expression; None if it cannot be parsed."""
    if isinstance(answer, Quantity):
        return sympy.Rational(answer.value.numerator, answer.value.denominator)
    if len(answer.latex) > MAX_FORMULA or _LARGE_BINOMIAL.search(answer.latex):
        raise TooLarge(f"the formula has more than {MAX_FORMULA} characters, or large binomials")
    found = _quietly(_expression, answer.latex)
    bits = None if found is None else _quietly(_bits, found)
    if bits is not None and bits > MAX_BITS:
        raise TooLarge(f"the formula leads to numbers of more than {MAX_BITS} bits")
    return None if bits is None else found


def _expression(latex: str) -> Any:
    latex = normalize_latex(_DEGREES.sub(r"\\cdot\\frac{\\pi}{180}", latex), _SPELLING)
    found = latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=_MEANING)
    return found.xreplace({_I: sympy.I}) if _I in found.free_symbols else found


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
        return sum(parts) * max(map(_magnitude, expression.args))
    if isinstance(expression, (sympy.Pow, sympy.exp)):
        return max(parts[0], 2) * _magnitude(expression.exp)
    return sum(parts) + 1


def _magnitude(expression: Any) -> int:
    """An upper bound of an exponent's absolute value, up to 2 * MAX_BITS; of a formula at the points of comparison."""
    if isinstance(expression, sympy.Rational):
        return int(abs(expression)) + 1
    if isinstance(expression, sympy.Symbol):
        return 4
    if isinstance(expression, (sympy.Add, sympy.Mul)):
        parts = map(_magnitude, expression.args)
        return min(sum(parts) if isinstance(expression, sympy.Add) else math.prod(parts), 2 * MAX_BITS)
    if isinstance(expression, (sympy.Pow, sympy.exp)):
        base, power = (sympy.E, expression.exp) if isinstance(expression, sympy.exp) else expression.args
        base = 1 / base if power.is_negative and isinstance(base, sympy.Rational) and base else base
        return min(max(2, _magnitude(base)) ** min(_magnitude(power), MAX_BITS.bit_length()), 2 * MAX_BITS)
    return int(2 ** min(_bits(expression), MAX_BITS.bit_length()))


def _terms(limit: sympy.Tuple) -> int:
    """The terms of a sum or product over one variable; 1 if the limits are not integers: none is computed then."""
    _, first, last = limit
    return max(1, int(last) - int(first) + 1) if first.is_Integer and last.is_Integer else 1
