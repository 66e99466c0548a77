"""The cluster that a test of this folder runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machines.bed import Machines
from machines.clusters import Cluster, OnStarters


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kind: type[Cluster] = getattr(request, "param", OnStarters)
    with Machines(*kind.names, s3=True) as bed:
        yield kind(bed)
