"""The weights that SGLang starts with: from a store, or from the model's own folder while it is copied into the store.

Both are checked while SGLang starts, which takes longer, and before the server is registered as ready.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_tasks.engines.models import file_states, link_wanted
from areal_tasks.engines.service import ModelFolder, ServiceSpec
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import common_folder, materialise, read_weights
from areal_tasks.store.parallel import in_background
from schemas.errors import UserError


@dataclass(frozen=True)
class FirstWeights:
    """A local folder. `check`, called after it was read, raises UserError if its bytes are not the intended ones.

    `check_so_far` does so while it is being read, as soon as that is known.
    """

    folder: Path
    check_so_far: Callable[[], None]
    check: Callable[[], object]


def first_weights(spec: ServiceSpec) -> FirstWeights:
    """The weights that `spec` names. Raises UserError if it names none."""
    into = Path(tempfile.mkdtemp(prefix="weights-"))
    if spec.weights is not None:
        return _of_store(spec, into)
    if spec.folder is None:
        raise UserError("the inference server was given no weights; publish version 0 first")
    folder = spec.folder
    return FirstWeights(link_wanted(Path(folder.path), into), lambda: None, lambda: check_unchanged(folder))


def _of_store(spec: ServiceSpec, into: Path) -> FirstWeights:
    """The store's own folder if it is on this machine, hashed meanwhile; else a copy, which is fetched first."""
    assert spec.weights is not None
    store = open_store(spec.store_url)
    files = read_weights(store, spec.weights).files
    checked = in_background(lambda: materialise(store, files, into, verify=True), "weights")

    def check_so_far() -> None:
        if checked.done():
            checked.result()

    return FirstWeights(store.local(common_folder(files)) or checked.result(), check_so_far, checked.result)


def check_unchanged(folder: ModelFolder) -> None:
    """Raise UserError if a file of the folder has changed: SGLang may have read other bytes than the store has."""
    now = file_states(Path(folder.path))
    changed = sorted(name for name in now.keys() | folder.files.keys() if now.get(name) != folder.files.get(name))
    if changed:
        raise UserError(
            f"model.path: {changed[0]} in {folder.path} was changed while the run started with it; run again "
            "under another name once the folder is complete"
        )
