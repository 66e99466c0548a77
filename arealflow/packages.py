"""Detects packages of the user that hide arealflow's, whose names are generic: Python imports the first one it finds.

This module imports none of these packages, so that it can report the conflict.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("flows", "areal_tasks", "schemas", "deployments")
#: The folder in which they are installed: a checkout, or Python's site-packages.
INSTALLED: Final = Path(__file__).resolve().parents[1]


def check_packages() -> None:
    """Raise ImportError, with the remedy, if Python finds other packages of these names."""
    for name in PACKAGES:
        folder = _found(name)
        if folder is not None and folder != INSTALLED / name:
            raise ImportError(
                f"Python finds {folder} instead of arealflow's own package {name!r}. Rename that folder, or take "
                f"{folder.parent} out of PYTHONPATH; or start Python from another folder, or with -P."
            )


def _found(name: str) -> Path | None:
    """The folder of the package, or the file of the module, that `import name` gives; None if there is neither."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [spec.origin])
    return Path(places[0]).resolve() if places and places[0] else None


def namesakes(folder: Path) -> list[str]:
    """Names of arealflow's packages that `folder` also has, unless arealflow is installed there."""
    if folder.resolve() == INSTALLED:
        return []
    return [name for name in PACKAGES if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]


def note(folder: Path) -> str:
    """A note for users who work in `folder`, if it has packages of these names; else empty."""
    names = namesakes(folder)
    if not names:
        return ""
    listed = " and ".join(f"{name}/" for name in names)
    return (
        f"{listed} in {folder.resolve()} and arealflow have packages of the same name. arealflow's processes import "
        "its own, also where your rewards and workflows import these names; but Python started in this folder "
        "(`python -m`, a notebook) imports yours, and `arealflow.connect` raises ImportError there. "
        "Rename the folder, or keep recipes and rewards in another one."
    )
