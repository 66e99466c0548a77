"""A Prefect server on a busy machine takes longer than flows and the keeper would wait."""

from __future__ import annotations

import pytest
from waiting import LIMIT

from flows import artifacts, ending, observe
from flows.cli import keeper


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "ASK_TIMEOUT", LIMIT)
    monkeypatch.setattr(keeper, "TIMEOUT_SECONDS", LIMIT)
    monkeypatch.setattr(artifacts, "REQUEST_SECONDS", LIMIT)
    monkeypatch.setattr(observe, "CLOSE_SECONDS", LIMIT)
