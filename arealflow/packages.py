"""The packages that come with arealflow have plain names, which a folder of a user's may have too.

Python takes whichever it finds first. This module needs none of them, so that it can say what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("flows", "areal_tasks", "schemas", "deployments")
#: The folder that they are installed in: a checkout, or Python's site-packages.
INSTALLED: Final = Path(__file__).resolve().parents[1]


def check_packages() -> None:
    """ImportError, with the remedy, if Python finds other packages of these names here."""
    for name, folder in hidden():
        raise ImportError(
            f"Python finds {folder} instead of arealflow's own package {name!r}. Rename that folder, or take "
            f"{folder.parent} out of PYTHONPATH; or start Python from another folder, or with -P."
        )


def hidden() -> Iterator[tuple[str, Path]]:
    """Those of arealflow's packages in whose place Python finds others, and where these are."""
    for name in PACKAGES:
        folder = _found(name)
        if folder is not None and folder != INSTALLED / name:
            yield name, folder


def _found(name: str) -> Path | None:
    """The folder of the package that `import name` gives; of a module its file, None if there is neither."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [spec.origin])
    return Path(places[0]).resolve() if places and places[0] else None


def namesakes(folder: Path) -> list[str]:
    """Which of arealflow's packages have the name of something in `folder`, where arealflow itself is not."""
    if folder.resolve() == INSTALLED:
        return []
    return [name for name in PACKAGES if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]


def note(folder: Path) -> str:
    """What a user must know who works in a folder with such names; empty for any other."""
    names = namesakes(folder)
    if not names:
        return ""
    listed = " and ".join(f"{name}/" for name in names)
    return (
        f"{listed} in {folder.resolve()} and arealflow have packages of the same name. arealflow's own processes find "
        "their own; but Python that is started in this folder (`python -m`, a notebook) finds yours, where "
        "`arealflow.connect` ends with an ImportError; and rewards and workflows that import from it get arealflow's. "
        "Rename the folder, or keep recipes and rewards in another one."
    )
