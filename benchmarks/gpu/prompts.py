"""Prompts of one length for the measurements: slices of Python's own library, so that nothing is downloaded.

python -m benchmarks.gpu.prompts MODEL FILE [--count 512] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.gpu.shapes import corpus


def slices(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """`count` texts that the tokenizer gives about `tokens` ids each, the same at every call."""
    ids: list[int] = []
    for text in corpus():
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= count * tokens:
            break
    if len(ids) < count * tokens:
        raise SystemExit(f"the standard library has only {len(ids)} tokens; ask for fewer than {count} × {tokens}")
    parts = [ids[i * tokens : (i + 1) * tokens] for i in range(count)]
    texts: list[str] = tokenizer.batch_decode(parts)
    return texts


def write_prompts(file: Path, texts: list[str]) -> None:
    """A data set as recipes read it: columns `question` and `answer`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": text, "answer": str(i % 10)} for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(file: Path) -> list[str]:
    """The texts again."""
    return [json.loads(line)["question"] for line in file.read_text().splitlines()]


def make_prompts(model: Path, file: Path, count: int, tokens: int) -> Path:
    """Write the prompts of a model unless they are there."""
    if not file.exists():
        write_prompts(file, slices(AutoTokenizer.from_pretrained(model), count, tokens))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    make_prompts(arguments.model, arguments.file, arguments.count, arguments.tokens)


if __name__ == "__main__":
    main()
