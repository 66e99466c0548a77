"""All files of a store."""

from __future__ import annotations

from areal_tasks.store.backend import Store
from areal_tasks.store.objects.inventory import entries


def listed(store: Store, prefix: str) -> list[str]:
    """Paths of the files below the folder `prefix`, without unfinished ones, sorted; empty if there is none."""
    return [entry.path for entry in entries(store, prefix) if not entry.path.rsplit("/", 1)[-1].startswith(".")]
