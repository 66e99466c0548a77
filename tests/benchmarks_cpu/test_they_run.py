"""Benchmarks for two cores, at a tiny size: the tables and servers they use change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import embedded, scale

SCALE = ["--iterations=3", "--samples=64", "--token-iterations=1", "--workers=0"]
CHECKPOINT = ["tiny", "--eager", "--rows=2", "--length=16", "--repeats=1", "--mb-per-second=10"]
LONG = pytest.mark.slow("it takes a quarter of a minute at its smallest")


def once(work: Callable[[], object], repeats: int = 1) -> scale.Cost:
    return scale._cost(work)


@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("store", ["--iterations=2", "--samples=16"], "a further float column on disk"),
        ("embedded", ["--rounds=2", "--threads=1"], "| 4 | 256 | 32 |"),
        pytest.param("scale", SCALE, "merging the whole run", marks=LONG),
        ("checkpoint", CHECKPOINT, "a step beside the write"),
        pytest.param(
            "overhead",
            ["--iterations=8"],
            "Prefect (flow less services + store)",
            marks=pytest.mark.slow("three runs, and a Prefect server of its own"),
        ),
    ],
)
def test_it_prints_its_table(
    name: str,
    options: list[str],
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(embedded, "CASES", embedded.CASES[:1])
    monkeypatch.setattr(scale, "best", once)
    monkeypatch.setattr(sys, "argv", [name, *options])
    import_module(f"benchmarks.{name}").main()
    assert capsys.readouterr().out.strip().splitlines()[-1].strip().startswith(last)
