"""The allowed imports: flows → areal_tasks → schemas, and Prefect only in flows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Top-level modules that a package must not import. `arealflow` is the name that users import: it stands above all.
FORBIDDEN = {
    "schemas": {"areal_tasks", "flows", "arealflow", "prefect", "torch", "transformers"},
    "areal_tasks": {"flows", "arealflow", "prefect"},
}


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The top-level modules that a file imports anywhere, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from ((name.partition(".")[0], node.lineno) for name in names)  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = [(path, *one) for path in files for one in imported(path)]
    assert {name for _, name, _ in found} >= {"schemas", "pydantic"}, "the files were read"
    wrong = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, name, line in found if name in FORBIDDEN[package]]
    assert not wrong
