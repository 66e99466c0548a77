"""A tokenizer with more tokens than its model: a row with one of them ends the run before it needs a service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stage_driver import drive, tiny, tiny_sft

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.models import load_tokenizer
from areal_tasks.engines.session import Engines
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe
from schemas.recipe.sections import ScratchModel


@pytest.mark.parametrize("make", [tiny, tiny_sft])
def test_a_row_with_a_token_that_the_model_lacks_is_refused(
    make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_scratch(ScratchModel(layers=1, hidden=16, heads=2, intermediate=16), 1, 16, tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"{digit}+" for digit in range(10)])
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(Engines, "start", lambda self, initial, *_: setattr(self, "initial", initial))  # no service
    with pytest.raises(UserError, match=r"row 0 .from 0. has the token '\d\+' .* the model's vocabulary ends at"):
        drive(tmp_path, "lacks", make(model={"path": str(folder), "scratch": None, "max_length": 12}))
