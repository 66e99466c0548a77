"""Weights as versions: listed, exported for plain transformers, compared, tagged; and those that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from stage_driver import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.history.journal import append_log, read_log
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.opening import open_run
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import remove_planned
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import compare_folders, find_weights, list_weights
from flows.cli import main
from schemas.errors import UserError
from schemas.manifest import IterationCommit


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["arealflow", "weights", *words])
    main.app(standalone_mode=False)
    return capsys.readouterr().out


def test_versions_are_listed_with_their_tags(
    small: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call(capsys, monkeypatch, "small", "protect", "2", "--store", small.url)
    call(capsys, monkeypatch, "small", "tag", "newest", "last", "--store", small.url)
    rows = json.loads(call(capsys, monkeypatch, "small", "--store", small.url, "--json"))
    assert [(r["version"], r["state"], r["tags"], r["protected"]) for r in rows] == [
        (0, "written", [], False),
        (1, "written", ["first"], False),
        (2, "written", ["last"], True),
    ]
    folder = f"small/weights/version=000001/attempt={rows[1]['attempt']}/"
    assert rows[1]["bytes"] == sum(e.bytes for e in entries(small, "small/weights") if e.path.startswith(folder))


def test_an_exported_version_loads_with_plain_transformers(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for name in ("first", "2"):
        out = call(capsys, monkeypatch, "small", "export", name, str(tmp_path / name), "--store", small.url)
        assert str(tmp_path / name) in out
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokens = AutoTokenizer.from_pretrained(tmp_path / name)("1+2=", return_tensors="pt")
        outputs.append(model(tokens["input_ids"]).logits)
    assert torch.isfinite(outputs[0]).all() and not torch.equal(*outputs)
    exported = read_log(small, "small")[-1]
    assert (exported.action, exported.details["version"]) == ("exported", 2)
    with pytest.raises(UserError, match="is not empty"):
        call(capsys, monkeypatch, "small", "export", "2", str(tmp_path / "2"), "--store", small.url)


def test_two_versions_are_compared_tensor_by_tensor(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(call(capsys, monkeypatch, "small", "compare", "1", "2", "--store", small.url, "--json"))
    for name in ("1", "2"):
        call(capsys, monkeypatch, "small", "export", name, str(tmp_path / name), "--store", small.url)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / n).state_dict() for n in ("1", "2"))
    assert rows and {row["tensor"] for row in rows} <= set(one)
    for row in rows:
        left, right = one[row["tensor"]].double(), two[row["tensor"]].double()
        assert row["largest"] == (left - right).abs().max().item() > 0
        assert row["mean"] == pytest.approx((left - right).abs().mean().item())
        cosine = torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0).item()
        assert row["cosine"] == pytest.approx(cosine)
    for same in compare_folders(tmp_path / "1", tmp_path / "1"):
        assert (same.largest, same.mean, same.cosine) == (0.0, 0.0, pytest.approx(1.0))


def test_a_version_that_was_not_written_names_the_nearest_that_was(small: Store) -> None:
    run = load_run(small, "small")
    path = paths.iteration_commit("small", 1)
    commit = IterationCommit.parse(small.read(path))
    unwritten = commit.weights.model_copy(update={"attempt": "", "path": "", "sha256": ""})
    Path(small.uri(path)).write_bytes(commit.model_copy(update={"weights": unwritten}).encode(path))
    assert [(v.version, v.state) for v in list_weights(run)] == [(0, "written"), (1, "written"), (2, "not written")]
    with pytest.raises(UserError, match=r"handed to the servers and not written .*: version 1 is the nearest"):
        find_weights(run, "2")


def test_a_version_that_gc_removed_says_who_removed_it(small: Store, tmp_path: Path) -> None:
    (Path(small.uri("small/tags/first.json"))).unlink()
    append_log(small, "small", "finished", {"owner": 1})
    rule = RetentionRule(keep_weights=1, older_than=0.0)
    remove_planned(small, plan_removals(small, rule), rule)
    run = load_run(small, "small")
    assert [v.state for v in list_weights(run)] == ["written", "removed", "written"]
    with pytest.raises(UserError, match=r"weights of version 1 of run 'small' were removed by .*--keep-weights 1"):
        find_weights(run, "1")


def test_a_run_without_iterations_has_no_weights(small: Store) -> None:
    run = open_run(small, "empty", tiny())
    for name in ("newest", "0"):
        with pytest.raises(UserError, match="Run 'empty' has no weights yet"):
            find_weights(run, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["small", "export", "7", "x"], r"no weights '7': versions are 0 to 2, tags: first"),
        (["small", "export", "nosuch", "x"], r"no weights 'nosuch'"),
        (["small", "export", "1"], r"'export 1' should be one of: list"),
        (["small", "burn"], r"'burn' should be one of: list"),
        (["nosuch"], r"no run 'nosuch'"),
    ],
)
def test_mistakes_are_explained(
    small: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        call(capsys, monkeypatch, *words, "--store", small.url)
