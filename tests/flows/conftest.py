"""A Prefect server on a busy machine takes longer than a flow that is about to be killed would wait."""

from __future__ import annotations

import httpx
import pytest
from waiting import LIMIT

from flows import execute


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "ASK_TIMEOUT", httpx.Timeout(LIMIT))
