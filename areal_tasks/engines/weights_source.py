"""Where inference servers read the committed weights of a run: in the store, or in a folder of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal_tasks.engines.fetching import Fetched
from areal_tasks.engines.handover import name_of
from areal_tasks.launchers.choice import on_this_machine
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import common_folder, read_weights
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import Recipe, SftRecipe


class WeightsSource:
    """`reads_store`: whether the servers load weights from the store by themselves; else they load folders."""

    def __init__(self, store: Store, reads_store: bool) -> None:
        self.store = store
        self.reads_store = reads_store
        self.fetched = Fetched()

    def target(self, ref: WeightsRef) -> tuple[int, str, str | None]:
        """Version, name and URL or folder of these weights; None if servers cannot load them by themselves."""
        if not ref.written or self.reads_store:
            return ref.version, name_of(ref), self.store.uri(ref.path) if ref.written else None
        folder = self.store.local(common_folder(read_weights(self.store, ref).files))
        return ref.version, name_of(ref), str(folder) if folder else None

    @contextmanager
    def opened(self, ref: WeightsRef) -> Iterator[str]:
        """A URL or folder from which the servers can load committed weights, which are fetched into it if necessary."""
        if self.reads_store:
            yield self.store.uri(ref.path)
            return
        with self.fetched.local(self.store, ref) as folder:
            yield str(folder)


def read_store(recipe: Recipe, external: Sequence[str]) -> bool:
    """Whether servers of this recipe load weights from the store by themselves; `external` ones of SGLang are asked."""
    if isinstance(recipe, SftRecipe):
        return False
    return recipe.inference.engine == "embedded" or not (external or on_this_machine(recipe.launcher))
