"""Sums such as `3+5+9+2=`, generated from a URL: the quickstart's data set, without any file or download.

`sums://TERMS` names all 10**TERMS sums of that many digits. A fixed permutation orders them; the first tenth is the
split `test`, the rest `train`. The rows depend on the URL alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from areal_tasks.data.sampler import permutation
from schemas.errors import UserError

SCHEME: Final = "sums://"
MIN_TERMS: Final = 2
MAX_TERMS: Final = 5
_ORDER_SEED: Final = 20_240
_ORDER: Final = 1


def terms_of(url: str) -> int:
    """The number of terms in `url`. UserError if it is not `sums://TERMS`."""
    text = url.removeprefix(SCHEME)
    if not text.isdecimal() or not MIN_TERMS <= int(text) <= MAX_TERMS:
        raise UserError(
            f"data.source: '{url}' should be {SCHEME}TERMS with {MIN_TERMS} to {MAX_TERMS} terms, such as {SCHEME}4"
        )
    return int(text)


def sums(url: str, split: str) -> Iterator[tuple[str, str]]:
    """The (prompt, answer) rows of a split, `train` or `test`; the two share no prompt."""
    terms = terms_of(url)
    total = 10**terms
    for offset in _offsets(split, total):
        yield _sum(permutation(offset, total, _ORDER_SEED, 0, _ORDER), terms)


def _offsets(split: str, total: int) -> range:
    held_out = total // 10
    splits = {"test": range(held_out), "train": range(held_out, total)}
    if split not in splits:
        raise UserError(f"{SCHEME} has the splits train and test, not '{split}'")
    return splits[split]


def _sum(number: int, terms: int) -> tuple[str, str]:
    digits = f"{number:0{terms}d}"
    return "+".join(digits) + "=", str(sum(map(int, digits)))
