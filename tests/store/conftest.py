"""The store's tests run on a local folder and on S3 alike."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from s3_server import BUCKET

from areal_tasks.store.backend import Store, open_store


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    request.getfixturevalue("s3")
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())
