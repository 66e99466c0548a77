"""Fixtures that several parts share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from s3_server import BUCKET, S3Server, s3_server

from areal_tasks.store.backend import Store, open_store


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server on this machine, whose keys are in the environment from here on."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def s3_store(s3: S3Server) -> Store:
    """A store on a real S3 server, empty at first and shared by the session: use run names of your own."""
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
