"""From rows to token ids: prompts for generation, and demonstrations for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from areal_tasks.data.datasets import Row
from schemas.errors import UserError, first_line
from schemas.recipe.sections import Data
from schemas.tables import PROMPTS


def render_prompts(
    rows: Sequence[Row],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_new_tokens: int | None,
) -> pa.Table:
    """The table PROMPTS: the user's message as text, and the model's token ids (chat template applied).

    A prompt must leave `max_new_tokens` within `max_length`; None: tokens for the row's own answer and an end token, as
    in supervised fine-tuning. One that leaves fewer is an error, or dropped (`data.on_long_prompt`).
    """
    messages = [data.template.replace("{prompt}", row.prompt) for row in rows]
    texts = render_messages(rows, messages, data, tokenizer)
    ids = _encoded(texts, data, tokenizer)
    if max_new_tokens is None:
        rooms = [len(answer) for answer in encode_answers(texts, [row.answer for row in rows], tokenizer)]
    else:
        rooms = [max_new_tokens] * len(rows)
    _check_known(rows, texts, ids, tokenizer, added=[] if data.chat else tokenizer("")["input_ids"])
    fits = [len(prompt) + room <= max_length for prompt, room in zip(ids, rooms, strict=True)]
    if data.on_long_prompt == "error" and not all(fits):
        first = fits.index(False)
        raise UserError(
            f"{_place(rows[first])} has {len(ids[first])} tokens, which with room for {rooms[first]} more exceeds "
            f"model.max_length {max_length}; {fits.count(False)} prompts do. Raise model.max_length, lower "
            "max_new_tokens, or set data.on_long_prompt to drop"
        )
    if not any(fits):
        raise UserError(
            f"every one of {len(rows)} prompts is too long for model.max_length {max_length}; raise it, or lower "
            "max_new_tokens"
        )
    kept = [i for i, fit in enumerate(fits) if fit]
    columns = {
        "prompt_id": [rows[i].prompt_id for i in kept],
        "prompt": [messages[i] for i in kept],
        "answer": [rows[i].answer for i in kept],
        "input_ids": [ids[i] for i in kept],
        "num_tokens": [len(ids[i]) for i in kept],
    }
    return pa.table(columns, schema=PROMPTS)


def render_messages(
    rows: Sequence[Row], messages: Sequence[str], data: Data, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """The model's input as text: each row's message through the chat template, or unchanged.

    UserError if there is no chat template, or if it raises an error.
    """
    if not data.chat:
        return list(messages)
    if not tokenizer.chat_template:
        raise UserError("data.chat: this model's tokenizer has no chat template; set data.chat to false")
    system = [{"role": "system", "content": data.system}] if data.system else []
    chats = [[*system, {"role": "user", "content": message}] for message in messages]
    render: Any = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    try:
        texts: list[str] = render(chats)
    except Exception:  # a template is a program, which raises what it likes
        for row, chat in zip(rows, chats, strict=True):
            try:
                render(chat)
            except Exception as error:
                remedy = "clear data.system and write its text into data.template" if data.system else "correct it"
                raise UserError(
                    f"{_place(row)}: the model's chat template refuses its messages ({first_line(error)}); {remedy}, "
                    "or set data.chat to false"
                ) from error
        raise
    return texts


def _encoded(texts: Sequence[str], data: Data, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text. Without a chat template also what the tokenizer puts before a text, but not behind it."""
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=not data.chat)["input_ids"]
    behind = 0 if data.chat else _added_behind(max(texts, key=len), tokenizer)
    return [prompt[: len(prompt) - behind] for prompt in ids]


def _added_behind(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that the tokenizer adds behind a text, such as an end of sequence."""
    bare, whole = (tokenizer(text, add_special_tokens=added)["input_ids"] for added in (False, True))
    starts = range(len(whole) - len(bare) + 1)
    return next((len(whole) - len(bare) - start for start in starts if whole[start : start + len(bare)] == bare), 0)


def encode_answers(texts: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each answer as it continues its text, the end-of-sequence token last.

    Where the answer's first characters would join the text's last token, as it continues a line break: encoded by
    itself, it would get a blank in front by most SentencePiece tokenizers.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("this model's tokenizer names no end-of-sequence token (eos_token), so answers cannot end")

    def continuing(before: Sequence[str], after: Sequence[str]) -> list[list[int] | None]:
        """The ids of `after` that follow those of `before`; None where these are others than without `after`."""
        joined = [one + other for one, other in zip(before, after, strict=True)]
        begun, whole = (tokenizer(list(each), add_special_tokens=False)["input_ids"] for each in (before, joined))
        return [w[len(b) :] if w[: len(b)] == b else None for b, w in zip(begun, whole, strict=True)]

    found = continuing(texts, answers)
    for before in ("\n", ""):
        if missing := [i for i, ids in enumerate(found) if ids is None]:
            for i, ids in zip(missing, continuing([before] * len(missing), [answers[i] for i in missing]), strict=True):
                found[i] = ids
    return [[*(ids or ()), tokenizer.eos_token_id] for ids in found]


def _check_known(
    rows: Sequence[Row],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    added: Sequence[int],
) -> None:
    """Reject empty prompts, and those with more unknown tokens than the text spells out and `added` contains.

    Some tokenizers (OLMo-2) use one token as the unknown one and as the beginning of every prompt.
    """
    unknown, name = tokenizer.unk_token_id, tokenizer.unk_token
    for row, text, prompt in zip(rows, texts, ids, strict=True):
        if not prompt:
            raise UserError(f"{_place(row)} is empty: a model cannot continue an empty prompt")
        if unknown is not None and prompt.count(unknown) > text.count(name) + added.count(unknown):
            raise UserError(
                f"{_place(row)}, {row.prompt[:60]!r}, has characters outside the model's vocabulary; change "
                "data.template or the data, or model.scratch.alphabet"
            )


def check_in_vocabulary(
    prompts: pa.Table, data: Data, tokenizer: PreTrainedTokenizerBase, vocabulary: int, answers: bool
) -> None:
    """UserError names the first row of the table PROMPTS, and its token, that a model with this vocabulary lacks.

    With `answers`, those are checked too, as in supervised fine-tuning.
    """
    if max(tokenizer.get_vocab().values()) < vocabulary:
        return
    texts = prompts["input_ids"].to_pylist()
    if answers:
        texts = [example.input_ids for example in sft_examples(prompts, data, tokenizer)]
    for row, ids in zip(prompts["prompt_id"].to_pylist(), texts, strict=True):
        if lacking := [token for token in ids if token >= vocabulary]:
            raise UserError(
                f"row {row} (from 0) has the token {tokenizer.convert_ids_to_tokens(lacking[0])!r} of id {lacking[0]}, "
                f"but the model's vocabulary ends at {vocabulary - 1}: the tokenizer has {len(tokenizer)} tokens. Use "
                "the model's own tokenizer, enlarge its embeddings (resize_token_embeddings), or change the row"
            )


def _place(row: Row) -> str:
    return f"the prompt of row {row.prompt_id} (from 0)"


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration: element i of `loss_mask` tells whether token i of `input_ids` counts in the loss."""

    prompt_id: int
    prompt: str
    completion: str
    input_ids: list[int]
    loss_mask: list[bool]


def sft_examples(prompts: pa.Table, data: Data, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Demonstrations from rows of the table PROMPTS: the answer and the end token count in the loss.

    The prompt's ids are exactly those from which rollouts generate.
    """
    columns = [prompts.column(name).to_pylist() for name in ("prompt_id", "prompt", "answer", "input_ids")]
    rows = [*map(Row, *columns[:3])]
    answers = encode_answers(render_messages(rows, columns[1], data, tokenizer), columns[2], tokenizer)
    return [
        Example(number, prompt, answer, [*ids, *more], [False] * len(ids) + [True] * len(more))
        for number, prompt, answer, ids, more in zip(*columns, answers, strict=True)
    ]
