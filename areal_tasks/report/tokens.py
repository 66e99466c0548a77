"""The texts of token ids, by the tokenizer of a run's initial weights. Reads only its small files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from areal_tasks.engines import models
from areal_tasks.store.reachable import published_weights
from areal_tasks.store.runs import Run
from schemas.errors import UserError

Decode = Callable[[list[int]], str]
Name = Callable[[int], str | None]

_BROKEN: Final = "\ufffd"  # what decoders give for a part of a character
_FAST: Final = "tokenizer.json"
_VISIBLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN: Final = [byte for byte in range(256) if byte not in _VISIBLE]
#: The byte of each character of GPT-2's alphabet: visible Latin-1 as it is, other bytes from 256 on.
_BYTES: Final = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


def vocabulary(run: Run, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """The text of each id; or no texts and the reason: the page then shows ids."""
    try:
        with TemporaryDirectory(prefix="arealflow-report-") as scratch:
            return texts_of(*load_tokenizer(run, Path(scratch)), ids), ""
    except (UserError, OSError, ValueError) as error:
        return {}, f"Tokens of run {run.name} are shown as numbers, as its tokenizer cannot be used: {error}"


def texts_of(decode: Decode, name: Name, ids: Iterable[int]) -> dict[int, str]:
    """The text that each token adds; for a part of a character, its bytes as `<0xF0>`."""
    known = sorted(set(ids))
    anchor = next((i for i in known if (text := decode([i])).isascii() and text.strip()), None)
    if anchor is None:
        texts = {i: decode([i]) for i in known}
    else:  # what each adds after another one, since decoders drop a leading space
        before = decode([anchor])
        texts = {i: decode([anchor, i]).removeprefix(before) for i in known}
    return {i: bytes_of(name(i) or text) if _BROKEN in text else text for i, text in texts.items()}


def bytes_of(name: str) -> str:
    """A token's name in GPT-2's alphabet of bytes as `<0xF0><0x9F>`; other names unchanged."""
    numbers = [_BYTES.get(character) for character in name]
    return name if None in numbers else "".join(f"<0x{number:02X}>" for number in numbers)


def load_tokenizer(run: Run, scratch: Path) -> tuple[Decode, Name]:
    """The run's tokenizer as two functions: decode ids, and name a token.

    Raises UserError: the run has no initial weights, as stage `initialise` recorded them, or they hold no tokenizer.
    """
    initial = next((ref for ref in run.commit(0).stages if ref.stage == "initialise"), None)
    if initial is None:
        raise UserError("it has no initial weights")
    folder = models.describing_files(run.store, published_weights(run.store, run.read_stage(initial)), scratch)
    if (folder / _FAST).is_file():
        from tokenizers import Tokenizer  # takes milliseconds, and no torch

        tokenizer = Tokenizer.from_buffer((folder / _FAST).read_bytes())
        name = tokenizer.id_to_token
    else:  # an older format, which transformers reads
        tokenizer = models.load_tokenizer(folder)
        name = tokenizer.convert_ids_to_tokens
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), name
