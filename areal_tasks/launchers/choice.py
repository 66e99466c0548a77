"""The launcher that a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from areal_tasks.launchers.cluster import Cluster
from areal_tasks.launchers.local import InlineLauncher, LocalLauncher
from areal_tasks.launchers.protocol import Launcher
from areal_tasks.store.backend import Store
from areal_tasks.user_code import find_object
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher as Settings


def on_this_machine(settings: Settings) -> bool:
    return settings.type in _HERE


def check_shared(store: Store, settings: Settings) -> None:
    """UserError if services run on other machines, and the store is a folder of this one."""
    if not on_this_machine(settings) and store.local("") is not None:
        raise UserError(
            f"store.url: {store.url} is a folder of this machine, and launcher.type {settings.type} runs services on "
            "others; use s3://… (docs/operate/s3.md)"
        )


def make_launcher(settings: Settings, store: Store) -> Launcher:
    """A new launcher of `launcher.type`. UserError as of `check_shared` and `make_cluster`."""
    if (make := _HERE.get(settings.type)) is not None:
        return make()
    check_shared(store, settings)
    from areal_tasks.launchers.remote import RemoteLauncher  # imports what no launcher on this machine needs

    return RemoteLauncher(make_cluster(settings), settings, store)


def make_cluster(settings: Settings) -> Cluster:
    """The cluster system of `launcher.type`. UserError if it is not installed or cannot be reached."""
    name = _CLUSTERS.get(settings.type, settings.type)
    made: Cluster = find_object(name, "launcher.type")(settings)
    return made


#: The module of rollout workers, which users' code may end: on this machine a spare one waits.
WORKER: Final = "areal_tasks.rollout.worker"
_HERE: Final[dict[str, Callable[[], Launcher]]] = {
    "local": lambda: LocalLauncher(WORKER),
    "inline": InlineLauncher,
}
_CLUSTERS: Final = {"ray": "areal_tasks.launchers.ray:RayCluster", "slurm": "areal_tasks.launchers.slurm:slurm"}
