"""Servers that run already: how they are named, and that a run starts and stops none."""

from __future__ import annotations

import pytest

from areal_tasks.engines.external import external_servers, external_token
from schemas.errors import UserError


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("", []),
        ("10.0.0.5:30000", ["http://10.0.0.5:30000"]),
        ("a:1, https://b.example/ ,http://c:2", ["http://a:1", "https://b.example", "http://c:2"]),
        ("[::1]:30000", ["http://[::1]:30000"]),
    ],
)
def test_addresses(text: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", text)
    assert external_servers() == urls


@pytest.mark.parametrize("text", ["a", "a:b", "ftp://a:1", "http://:30000", ":30000"])
def test_what_is_no_address(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", text)
    with pytest.raises(UserError, match=r"AREAL_LLM_SERVER_ADDRS: .* should look like host:port"):
        external_servers()


def test_their_token_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_TOKEN", raising=False)
    assert external_token() == ""
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN", "t")
    assert external_token() == "t"
