"""Stop strings: found in the text of the last tokens, after every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_TOKENS_PER_CHARACTER: Final = 4  # byte-level vocabularies spend up to four tokens on one character


class Detokenizer:
    """Tokens to text, through the fast tokenizer's own batch call where there is one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._backend = None

    def texts(self, outputs: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each output."""
        if self._backend is not None:
            return list(self._backend.decode_batch(list(outputs), skip_special_tokens=skip_special_tokens))
        return [self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in outputs]

    def find_stop(self, tail: Sequence[int], stops: Sequence[str]) -> str | None:
        """The stop string that the newest tokens complete, if any. `tail`: the last `tail_length(stops)` tokens."""
        text = self.texts([tail], skip_special_tokens=False)[0]
        return next((stop for stop in stops if stop in text), None)


def tail_length(stops: Sequence[str]) -> int:
    """Tokens that must be looked at so that no stop string ending in the newest one is missed."""
    return _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1


def trim(text: str, stop: str, keep: bool = False) -> str:
    """`text` up to the stop string; with `keep`, up to its end."""
    before, found, _ = text.partition(stop)
    return before + found if keep else before
