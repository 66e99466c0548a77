"""The plugin's hooks, called as SGLang's scheduler calls them. The contract's cases show the same of SGLang itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

from areal_tasks.engines.sglang import plugin


class Scheduler:
    """What the hooks use of SGLang's: requests in a queue, passes over a batch, and weights that are replaced."""

    def __init__(self, version: int) -> None:
        self.server_args = Thing(weight_version=str(version))
        self.waiting_queue: list[Any] = []
        self.tags: dict[str, list[int]] = {}

    def receive(self, name: str) -> Any:
        request = Thing(name=name, extra_key=None)
        plugin.isolate_request(self, request)
        self.waiting_queue.append(request)
        return request

    def run(self, *requests: Any) -> None:
        self.waiting_queue = [waiting for waiting in self.waiting_queue if waiting not in requests]
        result = Thing(logits_output=Thing(customized_info=None))
        plugin.tag_tokens(result, self, Thing(reqs=requests))
        for request, tag in zip(requests, result.logits_output.customized_info[plugin.TOKEN_TAGS], strict=True):
            self.tags.setdefault(request.name, []).append(tag)

    def update(self, version: int | None, success: bool = True) -> None:
        command = Thing(weight_version=None if version is None else str(version))
        plugin.note_update(Thing(success=success), Thing(scheduler=self), command)

    def found(self, name: str) -> tuple[list[int], list[bool]]:
        return plugin.decode_tags(self.tags[name])


def test_tokens_after_an_update_in_place_are_of_the_new_version_and_over_older_cache() -> None:
    scheduler = Scheduler(3)
    request = scheduler.receive("a")
    scheduler.run(request)
    scheduler.run(request)
    scheduler.update(4)
    scheduler.run(request)
    assert scheduler.found("a") == ([3, 3, 4], [False, False, True])


def test_a_request_that_lost_its_cache_is_no_longer_stale() -> None:
    scheduler = Scheduler(3)
    request = scheduler.receive("a")
    scheduler.run(request)
    plugin.forget_cache(None, request)
    scheduler.waiting_queue.append(request)
    scheduler.update(4)
    assert request.extra_key == "version 4"  # it must not find its own older prefix again
    scheduler.run(request)
    assert scheduler.found("a") == ([3, 4], [False, False])


def test_prefixes_are_shared_within_a_version_only() -> None:
    scheduler = Scheduler(0)
    running, waiting = scheduler.receive("running"), scheduler.receive("waiting")
    scheduler.run(running)
    scheduler.update(1)
    late = scheduler.receive("late")
    assert (running.extra_key, waiting.extra_key, late.extra_key) == ("version 0", "version 1", "version 1")
    scheduler.run(running, waiting, late)
    assert scheduler.found("waiting") == scheduler.found("late") == ([1], [False])
    assert scheduler.found("running") == ([0, 1], [False, True])


def test_an_update_that_failed_or_names_no_version_changes_nothing() -> None:
    scheduler = Scheduler(2)
    scheduler.update(3, success=False)
    scheduler.update(None)
    assert plugin.version_of(scheduler) == 2


def test_a_pass_without_logits_is_left_alone() -> None:
    plugin.tag_tokens(Thing(logits_output=None), Scheduler(0), Thing(reqs=[]))


def test_the_plugin_is_found_by_processes_with_its_folder_on_their_path(tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "[found] = entry_points(group='sglang.srt.plugins')\n"
        "print(found.name, found.load().__name__)"
    )
    root = Path(plugin.__file__).parents[3]
    path = f"{plugin.install(tmp_path / 'plugin')}:{root}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["arealflow", "register"], done.stderr
