"""What ends a completion before its maximum length: end tokens, and stop strings in its text.

A completion ends with the first token that is an end token or completes a stop string; without such a token it is
truncated at its maximum length. An engine checks what it generates for one request. SGLang does not check the last
token that it may generate (`update_finish_state` of 0.5.17 compares lengths first), and no engine finds a stop string
that began before an interruption: the client checks these two cases (`Ends.found`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: Further tokens that end a completion in SGLang, where a tokenizer has them (hf_transformers/common.py of 0.5.17).
ADDED_ENDS: Final = ("<|eom_id|>", "<|content_model_end_sampling|>")
_TOKENS_PER_CHARACTER: Final = 4  # byte-level vocabularies spend up to four tokens on one character


class Detokenizer:
    """Tokens to text, through the fast tokenizer's own batch call where there is one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._backend = None

    @property
    def as_json(self) -> str:
        """The fast tokenizer, serialised for another process; empty if there is none."""
        return "" if self._backend is None else str(self._backend.to_str())

    def texts(self, outputs: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        if self._backend is not None:
            return list(self._backend.decode_batch(list(outputs), skip_special_tokens=skip_special_tokens))
        return [self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in outputs]

    def find_stop(self, tail: Sequence[int], stops: Sequence[str]) -> str | None:
        """The stop string that the newest tokens complete, if any. `tail`: the last `tail_length(stops)` tokens."""
        text = self.texts([tail], skip_special_tokens=False)[0]
        return next((stop for stop in stops if stop in text), None)


def tail_length(stops: Sequence[str]) -> int:
    """How many of the last tokens must be checked to find every stop string that ends in the newest one."""
    return _TOKENS_PER_CHARACTER * max(map(len, stops), default=0) + 1


@dataclass(frozen=True)
class Ends:
    """The end tokens of a model and its detokenizer; neither is known by default."""

    tokens: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None

    def found(
        self, output: Sequence[int], begun: int, at_limit: bool, stops: Sequence[str], stop_ids: Collection[int]
    ) -> int | None:
        """The completion's length in tokens of `output`, if it ends where the engine has not checked; else None.

        The engine has generated the tokens from `begun` on; `at_limit`: it stopped at the maximum length.
        """
        if begun and (spanning := self._spanning(output, begun, stops)) is not None:
            return spanning
        if not (at_limit and output):
            return None
        ended = output[-1] in self.tokens or output[-1] in stop_ids or self._holds(output, stops)
        return len(output) if ended else None

    def _spanning(self, output: Sequence[int], begun: int, stops: Sequence[str]) -> int | None:
        """The end of a stop string that begins before `begun` and ends after it."""
        reach = tail_length(stops)
        first, last = max(begun - reach, 0), min(begun + reach, len(output))
        if not self._holds(output[first:last], stops) or self._holds(output[first:begun], stops):
            return None
        return next(end for end in range(begun + 1, last + 1) if self._holds(output[first:end], stops))

    def _holds(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether a stop string is in the text of the last of these tokens."""
        if self.detokenizer is None or not stops:
            return False
        return self.detokenizer.find_stop(tokens[-2 * tail_length(stops) :], stops) is not None


def end_tokens(config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end a completion, by a model's configurations and its tokenizer, as in SGLang."""
    found = [getattr(one, "eos_token_id", None) for one in (config, generation_config, tokenizer)]
    flat = [t for item in found for t in (item if isinstance(item, list) else [item])]
    added = tokenizer.get_added_vocab() if tokenizer is not None else {}
    return frozenset(t for t in flat if t is not None) | {added[text] for text in ADDED_ENDS if text in added}
