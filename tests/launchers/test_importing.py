"""Imports without the garbage collector leave it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from areal_tasks.garbage import importing


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Whatever a test does, later ones find the collector on, and all objects within its reach."""
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_while_modules_are_imported() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_it_is_on_again_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError("no such module")
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
