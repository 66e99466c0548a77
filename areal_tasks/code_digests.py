"""Digests of the users' code that a recipe names. They are in the key of every stage that uses it: an edit rebuilds.

A digest covers
- the named package, or the named module outside a package: every Python file and compiled module in it;
- in the same way, all packages and modules of the user that their files import, at any depth. Imports are read and not
  executed, so that a name that is computed is not found;
- name and version of installed packages that these import, arealflow included; the files of those without a version.

Python's own modules do not count, nor does what code reads in other ways, such as a list of words in a file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

from schemas.errors import UserError

#: Recipe fields that may name users' code, on which the content of tables depends.
FIELDS: Final = (VERIFIER := "reward.verifier", "workflow.name", "rollout.filters.function")
_OWN: Final = ("areal_tasks", "arealflow", "flows", "schemas")  # the program's packages, installed or not
_SUFFIXES: Final = (".py", ".so")
#: Of packages that this process has imported: the digests that they had then.
_IMPORTED: Final[WeakKeyDictionary[ModuleType, str]] = WeakKeyDictionary()


def code_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """By field, the digest of the users' code that a recipe (as JSON) names; empty if there is none here.

    Nothing is imported. Of a package that this process has imported it is that of the files which it has imported.
    """
    named = {field: str(reduce(lambda part, key: part.get(key) or {}, field.split("."), recipe)) for field in FIELDS}
    return {field: digest_of(package_of(name)) for field, name in named.items() if ":" in name}


def code_values(code: Mapping[str, str], fields: Collection[str]) -> dict[str, str]:
    """The values that the digests `code` add to a key that covers the recipe fields, or whole sections, `fields`."""
    covered = (field for field in code if any(f"{field}.".startswith(f"{part}.") for part in fields))
    return {f"code of {field}": code[field] for field in covered}


def check_same_code(expected: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    """UserError unless the code that a process would run is what its flow began with; `where`: `of the process …`."""
    if differing := [field for field, digest in expected.items() if found[field] != digest]:
        field, theirs = differing[0], found[differing[0]]
        raise UserError(
            f"{field}: the code {where} ({theirs or 'none'}) is not what this start of the flow began with "
            f"({expected[field] or 'none'}): it was edited meanwhile, or another machine has another copy. Start the "
            "run again, with the same code on every machine: what is not committed is then made with it."
        )


def package_of(name: str) -> str:
    """The outermost package, or the module, of `package.module:object`."""
    return name.partition(":")[0].partition(".")[0]


def digest_of(package: str) -> str:
    """The digest of a package of users' code; empty if there is none of this name here."""
    loaded = sys.modules.get(package)
    known = _IMPORTED.get(loaded) if loaded is not None else None
    return _read(package) if known is None else known


def imported(package: str, digest: str) -> None:
    """Record that this process has imported a package, which had this digest just before."""
    _IMPORTED.setdefault(sys.modules[package], digest)


def _read(package: str) -> str:
    found: dict[str, str] = {}
    names = [package]
    while names:
        name = names.pop()
        if name in found or name in sys.stdlib_module_names:
            continue
        places = _places(name)
        found[name] = _version(name, places) if name != package or name in _OWN else ""
        if not found[name]:
            found[name], more = _digest_and_imports(places)
            names += more
    return _short(json.dumps(found, sort_keys=True)) if found.get(package) else ""


def _places(name: str) -> list[Path]:
    """The folders of a package, or the file of a module; none if it does not exist or has no file."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that was not imported from a file
        spec = None
    if spec is None:
        return []
    folders = [*dict.fromkeys(map(Path, spec.submodule_search_locations or ()))]  # once, though found by two paths
    return folders or ([Path(spec.origin)] if spec.has_location and spec.origin else [])


def _version(name: str, places: Sequence[Path]) -> str:
    """The version of the installed package with a module of this name; empty for code that pip has not installed."""
    if name in _OWN:
        return _installed_version("arealflow") or "arealflow"
    if not any(_holds_installed(place.parent) for place in places):
        return ""
    return _installed_version(name) or ", ".join(map(_installed_version, packages_distributions().get(name, ())))


def _holds_installed(folder: Path) -> bool:
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def _installed_version(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return ""


def _digest_and_imports(places: Sequence[Path]) -> tuple[str, set[str]]:
    """The digest of the files of a package or module, and the outermost packages that they import."""
    digest, names = hashlib.sha256(), set[str]()
    files = [(path, str(path.relative_to(place))) for place in places for path in _files(place)]
    for path, name in files:
        content = path.read_bytes()
        digest.update(f"{name}\0".encode() + content)
        names |= _imports(content) if path.suffix == ".py" else set()
    return digest.hexdigest() if files else "", names


def _files(place: Path) -> list[Path]:
    """The files of a module or package; without hidden ones, such as an editor's copies."""
    if place.is_file():
        return [place]
    return sorted(path for path in _below(place, set()) if path.suffix in _SUFFIXES)


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """The files in a folder and, once each, in those below it and in linked ones, as Python imports them."""
    if (real := folder.resolve()) in seen:
        return
    seen.add(real)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _below(path, seen)
        elif path.is_file():
            yield path


def _imports(source: bytes) -> set[str]:
    """The outermost packages that a file imports by name, anywhere in it. Relative imports stay in its package."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # importing it fails, too
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [node.args[0].value for node in nodes if _imports_literally(node)]  # type: ignore[attr-defined]
    return {package_of(name) for name in names} - {""}


def _imports_literally(node: ast.AST) -> bool:
    """Whether it is a call such as `import_module("name")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    first = node.args[0]
    named = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return named and called in ("import_module", "__import__")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
