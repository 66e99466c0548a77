"""An S3 store that cannot be used says why, and soon."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from s3_server import BUCKET, S3Server

from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.objects import s3 as s3_module
from schemas.errors import UserError

USES: list[Callable[[Store], object]] = [
    lambda store: store.read("run/run.json"),
    lambda store: store.create("run/run.json", b"{}"),
    lambda store: store.exists("run/run.json"),
    lambda store: store.children(""),
]
EACH_USE = pytest.mark.parametrize("use", USES, ids=["read", "create", "exists", "children"])


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_missing_credentials(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"{name} is not set: export it"):
        open_store("s3://bucket/prefix")


@EACH_USE
@pytest.mark.parametrize(
    ("name", "cause"),
    [("AWS_ACCESS_KEY_ID", "does not know this access key"), ("AWS_SECRET_ACCESS_KEY", "the secret key is wrong")],
)
def test_wrong_credentials(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, use: Callable[[Store], object], name: str, cause: str
) -> None:
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(StoreError, match=f"({cause}|may not do that).*check AWS_ACCESS_KEY_ID"):
        use(open_store(f"s3://{BUCKET}/x"))


@pytest.mark.parametrize("use", [USES[0], USES[3]], ids=["read", "children"])
def test_a_bucket_that_does_not_exist(s3: S3Server, use: Callable[[Store], object]) -> None:
    with pytest.raises(StoreError, match=r"no-such-bucket.*create the bucket, or correct the store's URL"):
        use(open_store("s3://no-such-bucket/x"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has never answered is asked some times, and not waited for."""

    def pause(attempt: int) -> float:
        assert attempt < s3_module._ATTEMPTS, "it is asked again"
        return 0.0

    monkeypatch.setattr(s3_module, "_pause", pause)


@EACH_USE
def test_nobody_listens(
    s3: S3Server, impatient: None, monkeypatch: pytest.MonkeyPatch, use: Callable[[Store], object]
) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"cannot be reached .*check AWS_ENDPOINT_URL"):
            use(open_store(f"s3://{BUCKET}/x"))


def test_nobody_answers(s3: S3Server, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops what arrives, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"cannot be reached \(Connect timeout on endpoint"):
            open_store(f"s3://{BUCKET}/x").read("run/run.json")
        for filler in fillers:
            filler.close()
