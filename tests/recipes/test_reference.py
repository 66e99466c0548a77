"""docs/reference/recipe.md says what the models say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schemas.recipe import reference
from schemas.recipe.fields import is_live, is_semantic, nested_section
from schemas.recipe.load import RECIPES


def test_the_page_is_up_to_date() -> None:
    assert reference.main(["--check"]) == 0, "run python -m schemas.recipe.reference"


def test_the_check_fails_on_an_old_or_missing_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "PAGE", tmp_path / "docs" / "reference" / "recipe.md")
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "docs" / "reference" / "recipe.md").write_text("old")
    assert reference.main(["--check"]) == 1
    assert "run python -m schemas.recipe.reference" in capsys.readouterr().err


def test_the_page_has_every_field_with_its_description() -> None:
    page = reference.render()
    for model in RECIPES.values():
        for info in model.model_fields.values():
            section = nested_section(info)
            for name, field in (section.model_fields if section else {}).items():
                line = next(
                    line for line in page.splitlines() if line.startswith(f"| `{name}` |") and field.description in line
                )
                live = ", live" if is_live(field) else ""
                assert f"| {'semantic' if is_semantic(field) else 'operational'}{live} |" in line


def test_the_sections_that_are_changed_first_come_first() -> None:
    headings = re.findall(r"^## (.+)$", reference.render(), re.MULTILINE)
    sections = [heading for heading in headings if heading.split(" ")[0].split(".")[0] in reference.FIRST]
    assert headings[1 : 1 + len(sections)] == sections
    assert sections == ["data", "rollout", "rollout.filters", "reward", "algorithm", "algorithm (sft)"]
