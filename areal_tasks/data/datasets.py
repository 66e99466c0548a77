"""Rows of a data set: from a Hugging Face name, a local file, an object-store URL, or generated (`sums://`).

All errors in the data are reported here, with file and line, before any model is loaded."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Final

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal_tasks.data.sampler import permutation
from schemas.errors import UserError
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe
from schemas.recipe.sections import Data
from schemas.recipe.sources import SPLIT, local_path, source_kind

Pairs = Iterator[tuple[str, str]]
SCHEME: Final = "sums://"
MIN_TERMS: Final = 2
MAX_TERMS: Final = 5
_ORDER_SEED: Final = 20_240
_ORDER: Final = 1
_BATCH: Final = 1 << 14  # rows that become Python values together


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its number in the split (before rows are dropped), the raw prompt and the reference answer."""

    prompt_id: int
    prompt: str
    answer: str


def load_rows(data: Data, split: str) -> list[Row]:
    """The rows of `split`, in the order of the source, at most `data.limit`. UserError names the place of a mistake."""
    return [Row(number, *pair) for number, pair in enumerate(_pairs(data, split, data.limit))]


def _pairs(data: Data, split: str, limit: int) -> Pairs:
    """The first `limit` rows (0: all) as prompt and answer. UserError names the place of a mistake, or says no rows."""
    pairs = _READERS[source_kind(data.source)](data, split)
    if (first := next(pairs, None)) is None:
        raise UserError(f"{_where(data, split)} is empty: there is nothing to read")
    yield from islice(chain([first], pairs), limit or None)


def splits(recipe: Recipe) -> dict[str, str]:
    """The data-set split of each table: `prompts` (to train on), `eval_prompts` (held out)."""
    found = {}
    if not isinstance(recipe, EvaluateRecipe):
        found["prompts"] = recipe.data.train_split
    if not isinstance(recipe, SftRecipe) and (isinstance(recipe, EvaluateRecipe) or recipe.evaluation.every):
        found["eval_prompts"] = recipe.data.eval_split
    return found


def check_data(recipe: Recipe) -> None:
    """UserError if a split does not exist or is empty, or a row of it does not fit `data`. Uses no network."""
    data, kind = recipe.data, source_kind(recipe.data.source)
    if kind == "sums" or (kind == "file" and local_path(data.source) is not None):
        first_checks_all = kind == "sums" or data.source.endswith(".parquet")
        for split in splits(recipe).values():
            for _ in _pairs(data, split, 1 if first_checks_all else data.limit):
                pass  # reading a row checks it


def _where(data: Data, split: str) -> str:
    if source_kind(data.source) == "file":
        return f"data.source '{data.source.replace(SPLIT, split)}'"
    return f"data.source '{data.source}', split '{split}',"


# ── files and URLs ────────────────────────────────────────────────────────────────────────────────────────────────────


def _file_pairs(data: Data, split: str) -> Pairs:
    url, where = data.source.replace(SPLIT, split), _where(data, split)
    try:
        path = local_path(url)  # fsspec would take `::` and URLs of files in its own way
        with fsspec.open(url, "rb") if path is None else open(os.path.expanduser(path), "rb") as file:
            content: bytes = file.read()
    except FileNotFoundError:
        absolute = "://" in url or Path(url).is_absolute()
        looked = "" if absolute else f" (looked for {Path(url).absolute()})"
        raise UserError(f"{where}: there is no such file{looked}") from None
    except Exception as error:  # each object store has its own; the message names the URL
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{where} cannot be read: {cause}; check URL and credentials") from error
    return _FORMATS[PurePosixPath(url).suffix](content, data, where)


def _jsonl(content: bytes, data: Data, where: str) -> Pairs:
    for number, line in enumerate(content.split(b"\n"), 1):  # not splitlines: a string may hold other line ends
        if line.strip():
            place = f"{where}, line {number}"
            yield _pair(_json(line, place), data, place)


def _json_array(content: bytes, data: Data, where: str) -> Pairs:
    rows = _json(content, where) if content.strip() else []
    if not isinstance(rows, list):
        raise UserError(f"{where} should hold one array of objects; a file with one object per line is named .jsonl")
    for number, row in enumerate(rows, 1):
        yield _pair(row, data, f"{where}, element {number}")


def _json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of 4,300 digits, and of a thousand brackets
        raise UserError(f"{place} is no valid JSON: {error}") from None


def _parquet(content: bytes, data: Data, where: str) -> Pairs:
    try:
        file = pq.ParquetFile(io.BytesIO(content))
        _require_columns(names := file.schema_arrow.names, data, where)
        if twice := [name for name in (data.prompt_column, data.answer_column) if names.count(name) > 1]:
            raise UserError(f"{where} has several columns {twice[0]!r}: rename all but one")
        table = file.read(columns=[data.prompt_column, data.answer_column])
    except (pa.ArrowException, OSError) as error:  # the latter for damaged pages
        raise UserError(f"{where} is no valid Parquet file: {error}") from None
    for name, check in ((data.prompt_column, _prompt), (data.answer_column, _text)):
        for number in _suspects(table[name].slice(0, data.limit or None)):
            check(_value(table[name][number]), name, f"{where}, row {number + 1}")
    for batch in table.to_batches(_BATCH):
        columns = [map(str, batch[name].to_pylist()) for name in (data.prompt_column, data.answer_column)]
        yield from zip(*columns, strict=True)


def _suspects(column: pa.ChunkedArray) -> Iterable[int]:
    """The values that may be neither text nor a finite number, or blank, found without a loop over all of them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _suspects(column.cast(kind.value_type))
    if pa.types.is_integer(kind):
        wrong = column.is_null()
    elif pa.types.is_floating(kind):
        wrong = pc.invert(pc.fill_null(pc.is_finite(column.cast(pa.float64())), False))
    elif kind in (pa.string(), pa.large_string(), pa.string_view()):
        try:
            column.validate(full=True)  # that its bytes are UTF-8
        except pa.ArrowInvalid:
            return range(len(column))
        visible = pc.match_substring_regex(column.cast(pa.large_string()), r"[^\pZ\pC]")
        wrong = pc.invert(pc.fill_null(visible, False))
    else:
        return range(len(column))
    return pc.indices_nonzero(wrong).to_pylist()  # type: ignore[no-any-return]


def _value(scalar: pa.Scalar) -> Any:
    """The value in Python; bytes for a text that is no UTF-8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        plain = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
        return plain.as_buffer().to_pybytes()


_FORMATS: Final[dict[str, Callable[[bytes, Data, str], Pairs]]] = {
    ".jsonl": _jsonl,
    ".json": _json_array,
    ".parquet": _parquet,
}


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pair(row: Any, data: Data, place: str) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        raise UserError(f"{place} should be an object with named columns, not {type(row).__name__}")
    _require_columns(list(row), data, place)
    prompt, answer = data.prompt_column, data.answer_column
    return _prompt(row[prompt], prompt, place), _text(row[answer], answer, place)


def _require_columns(found: Sequence[str], data: Data, place: str) -> None:
    for field in ("prompt_column", "answer_column"):
        if getattr(data, field) not in found:
            raise UserError(
                f"{place} has no column '{getattr(data, field)}'; it has {', '.join(map(repr, found)) or 'none'}. "
                f"Name the right one in data.{field}"
            )


def _prompt(value: Any, column: str, place: str) -> str:
    text = _text(value, column, place)
    if not text.strip():
        raise UserError(f"{place}: column '{column}' is empty: a model cannot continue an empty prompt")
    return text


def _text(value: Any, column: str, place: str) -> str:
    number = type(value) is int or (type(value) is float and math.isfinite(value))  # no bool
    try:
        if number or isinstance(value, str):
            str(value).encode()  # not so half a character, which JSON can spell
            return str(value)
        found = json.dumps(value, default=str)
    except UnicodeEncodeError as error:
        found = f"{value[max(0, error.start - 20) : error.end]!r}, which ends in half a character (a lone surrogate)"
    raise UserError(f"{place}: column '{column}' should hold text or a number, not {found}")


# ── Hugging Face data sets ────────────────────────────────────────────────────────────────────────────────────────────


def _hub_pairs(data: Data, split: str) -> Pairs:
    where = _where(data, split)
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise UserError(
            f"{where} is the name of a Hugging Face data set, which needs the package 'datasets': "
            "pip install 'arealflow[datasets]', or name a .jsonl or .parquet file"
        ) from None
    try:
        rows = datasets.load_dataset(data.source, data.subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{where} cannot be loaded: {error}. Check data.source, data.subset and the splits' names, and that the "
            "network reaches the hub; a file (.jsonl, .json, .parquet) needs no hub"
        ) from error
    _require_columns(rows.column_names, data, where)
    for number, row in enumerate(rows.select_columns([data.prompt_column, data.answer_column]), 1):
        yield _pair(row, data, f"{where} row {number}")


# ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sums(url: str, split: str) -> Iterator[tuple[str, str]]:
    """The (prompt, answer) rows of a split, `train` or `test`; the two share no prompt.

    UserError if `url` is not `sums://TERMS`, or there is no such split.
    """
    text = url.removeprefix(SCHEME)
    if not text.isdecimal() or not MIN_TERMS <= int(text) <= MAX_TERMS:
        raise UserError(
            f"data.source: '{url}' should be {SCHEME}TERMS with {MIN_TERMS} to {MAX_TERMS} terms, such as {SCHEME}4"
        )
    terms = int(text)
    total = 10**terms
    splits = {"test": range(total // 10), "train": range(total // 10, total)}
    if split not in splits:
        raise UserError(f"{SCHEME} has the splits train and test, not '{split}'")
    for offset in splits[split]:
        digits = f"{permutation(offset, total, _ORDER_SEED, 0, _ORDER):0{terms}d}"
        yield "+".join(digits) + "=", str(sum(map(int, digits)))


_READERS: Final[dict[str, Callable[[Data, str], Pairs]]] = {
    "sums": lambda data, split: sums(data.source, split),
    "file": _file_pairs,
    "hub": _hub_pairs,
}
