"""Distribution of tests over xdist's workers: by whole modules, and all modules that share a server on one worker."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
import session_folder
from servers import OPEN
from xdist.scheduler import LoadScopeScheduling

#: The folder of the module that takes longest of all, which is run first.
LONGEST: Final = "machines"
#: Fixtures of servers that are expensive to start: modules that use one are run next, since they take long.
SERVERS: Final = ("api", "up")
#: Folders of modules that take long next, so that the last ones, which one worker may run alone, are short.
LONG: Final = frozenset({"stages", "fork", "trainer_group"})
#: By module, the server that it uses; without the modules that use none.
USED: Final[dict[Path, str]] = {}
GROUPS: Final = "groups.json"


def group_by_server(items: list[pytest.Item]) -> None:
    """Write the server of each module to a file, for the process that distributes the tests.

    These modules come first in `items` after those of LONGEST, then those of LONG.
    """
    for item in items:
        fixtures: Sequence[str] = getattr(item, "fixturenames", ())
        used = [name for name in SERVERS if name in fixtures]
        USED.update({item.path: used[0]} if used else {})
    folder = {item.path: item.path.parent.name for item in items}
    items.sort(key=lambda item: (folder[item.path] != LONGEST, item.path not in USED, folder[item.path] not in LONG))
    names = {item.nodeid.partition("::")[0]: USED[item.path] for item in items if item.path in USED}
    partial = session_folder.folder() / f"{GROUPS}.{os.getpid()}"
    partial.write_text(json.dumps(names))
    partial.rename(session_folder.folder() / GROUPS)


def end_servers(item: pytest.Item, following: pytest.Item | None) -> None:
    """End this module's server if the following module does not use it: modules of a server run in sequence."""
    name = USED.get(item.path, "")
    if name in OPEN and (following is None or USED.get(following.path) != name):
        OPEN.pop(name).close()


class ModuleScheduling(LoadScopeScheduling):
    """Distributes modules in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    @cached_property
    def groups(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((session_folder.folder() / GROUPS).read_text())
        return found

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return self.groups.get(module, module)
