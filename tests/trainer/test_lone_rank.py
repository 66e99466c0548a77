"""A lone rank that gathers and reduces its model at once makes the bits of one that does so a layer at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from warm_processes import output_of

WAYS = {"Fsdp2Backend": 1, "ByLayer": 3}  # two layers, and what is left


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `lone_rank` found, in a process of its own: a process group is for life."""
    folder = tmp_path_factory.mktemp("alone")
    output_of("-m", "tests.trainer.lone_rank", str(folder))
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


def test_a_small_model_is_one_part(found: dict[str, Any]) -> None:
    assert {way: found[way]["parts"] for way in WAYS} == WAYS


def test_parts_change_no_bit(found: dict[str, Any]) -> None:
    assert found["Fsdp2Backend"]["digest"] == found["ByLayer"]["digest"]
    assert found["Fsdp2Backend"]["after"] == found["ByLayer"]["after"] != found["ByLayer"]["digest"]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_does_not_tell_them_apart(found: dict[str, Any], way: str) -> None:
    assert found[way]["resumed"] == found[way]["after"]
