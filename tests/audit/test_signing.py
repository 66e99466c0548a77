"""Signatures of a root hash, and what `arealflow audit` and `arealflow log` print."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log, log_length, read_log
from areal_tasks.store.history.signing import root_hash, sign, unsigned_lines, verify
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from flows.cli import main
from schemas.errors import UserError
from schemas.manifest import IterationCommit


def key_files(folder: Path) -> tuple[Path, Path]:
    """A fresh key pair: a private PEM file, and the public half as OpenSSH writes it."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(
        key.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()),
    )
    public.write_bytes(key.public_key().public_bytes(keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH))
    return private, public


def test_a_signature_holds_while_the_log_grows_and_the_history_stands(small: Store, tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    made, new = sign(small, "small", audit(small, "small").root, 2, private)
    assert new and sign(small, "small", made.root, 2, private) == (made, False), "it covers all there is"
    append_log(small, "small", "exported", {"version": 1})
    [found] = verify(small, "small", public)
    assert (found.signature, found.problem) == (made, "")
    assert [line.action for line in read_log(small, "small")][-2:] == ["signed", "exported"]
    assert audit(small, "small").sound


def test_what_came_since_is_signed_by_another_signature(small: Store, tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    load = load_run(small, "small")
    early, _ = sign(small, "small", root_hash(load, 1), 1, private)
    late, new = sign(small, "small", root_hash(load, 2), 2, private)
    assert new and (early.iteration, late.iteration) == (0, 1)
    append_log(small, "small", "exported", {"version": 1})
    assert unsigned_lines(small, "small", late) == 1
    again, new = sign(small, "small", root_hash(load, 2), 2, private)
    assert new and again.root == late.root and again.log_records > late.log_records
    assert unsigned_lines(small, "small", again) == 0 and sign(small, "small", again.root, 2, private) == (again, False)
    assert [(found.signature, found.problem) for found in verify(small, "small", public)] == [
        (signature, "") for signature in (early, late, again)
    ]
    assert audit(small, "small").sound


def test_the_command_says_what_a_signature_leaves_out(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_files(tmp_path)

    def said(*words: str) -> str:
        code, out = call(capsys, monkeypatch, "audit", "small", "--store", small.url, *words)
        assert code == 0
        return out

    assert "signature" not in said()
    sign(small, "small", root_hash(load_run(small, "small"), 1), 1, private)
    append_log(small, "small", "exported", {"version": 1})
    left = (
        "until iteration 0; NOT signed: 1 later iterations and 1 lines of the log. `arealflow audit small --sign KEY`"
    )
    assert left in said() and left in said("--verify", str(public))
    assert "by a key that was not verified here, until" in said() and "not verified" not in said(
        "--verify", str(public)
    )
    [told] = json.loads(said("--json"))["signatures"]
    assert (told["holds"], told["known"], told["unsigned_iterations"], told["unsigned_log_lines"]) == (
        True,
        False,
        1,
        1,
    )
    assert json.loads(said("--verify", str(public), "--json"))["signatures"][0]["known"]
    assert "\nsigned until iteration 1 and line 5 of the log\n" in said("--sign", str(private))
    assert "not signed again: nothing was added since the signature until iteration 1" in said("--sign", str(private))
    assert "until iteration 1, which is all" in said("--verify", str(public))


def test_a_forged_history_is_not_what_was_signed(small: Store, tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    sign(small, "small", audit(small, "small").root, 2, private)
    path = paths.iteration_commit("small", 1)
    record = IterationCommit.parse(small.read(path))
    Path(small.uri(path)).write_bytes(record.model_copy(update={"state": {"next_group": 99}}).encode(path))
    [found] = verify(small, "small", public)
    assert found.problem == "the history until iteration 1 is not the one that was signed"


@pytest.mark.parametrize("verifies", [False, True])
def test_every_audit_checks_the_signatures_of_a_run_whose_history_was_cut(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verifies: bool
) -> None:
    private, public = key_files(tmp_path)
    sign(small, "small", root_hash(load_run(small, "small"), 1), 1, private)
    sign(small, "small", audit(small, "small").root, 2, private)
    cut_history(small)
    words = ("audit", "small", "--store", small.url, *(("--verify", str(public)) if verifies else ()))
    code, out = call(capsys, monkeypatch, *words)
    assert code == 1 and "does NOT hold: iteration 1 was signed and is gone: the history was cut" in out
    code, out = call(capsys, monkeypatch, *words, "--json")
    early, late = json.loads(out)["signatures"]
    assert code == 1 and not late["holds"] and late["unsigned_iterations"] == 0
    assert early["problem"] == "line 3 of the log was signed and is gone: the log was cut"


def cut_history(store: Store) -> None:
    """Delete the last commit, and what betrays that: the log's last lines, and the compaction."""
    Path(store.uri(paths.iteration_commit("small", 1))).unlink()
    shutil.rmtree(store.uri(paths.compactions("small")))
    for n in range(3, log_length(store, "small") + 1):
        Path(store.uri(paths.log("small", n))).unlink()
    assert audit(store, "small").sound and audit(store, "small").iterations == 1


def test_a_history_that_was_exchanged_is_told_without_a_key_and_not_signed(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, _ = key_files(tmp_path)
    sign(small, "small", audit(small, "small").root, 2, private)
    path = paths.iteration_commit("small", 1)
    record = IterationCommit.parse(small.read(path))
    Path(small.uri(path)).write_bytes(
        record.model_copy(update={"state": record.state | {"train_seconds_since_checkpoint": 99.0}}).encode(path)
    )
    Path(small.uri(paths.log("small", 3))).unlink()
    Path(small.uri(paths.log("small", 4))).unlink()
    assert audit(small, "small").sound
    code, out = call(capsys, monkeypatch, "audit", "small", "--store", small.url, "--sign", str(private))
    assert code == 1 and "does NOT hold: the history until iteration 1 is not the one that was signed" in out
    assert "its files are sound, its signatures are not" in out and "which is all" not in out
    assert len(small.children("small/signatures")) == 1


def test_what_a_signature_says_cannot_be_altered(small: Store, tmp_path: Path) -> None:
    private, _ = key_files(tmp_path)
    made, _ = sign(small, "small", audit(small, "small").root, 2, private)
    [name] = small.children("small/signatures")
    path = f"small/signatures/{name}"
    Path(small.uri(path)).write_bytes(made.model_copy(update={"log_records": 0}).encode(path))
    assert verify(small, "small")[0].problem == "it was not made with this key, or its content was altered"


def test_lines_of_the_log_that_were_signed_cannot_be_exchanged(small: Store, tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    sign(small, "small", audit(small, "small").root, 2, private)
    path = paths.log("small", 3)
    forged = read_log(small, "small")[2].model_copy(update={"user": "nobody"})
    Path(small.uri(path)).write_bytes(forged.encode(path))
    assert "lines of the log are not those that were signed" in verify(small, "small", public)[0].problem


def test_another_key_and_no_key(small: Store, tmp_path: Path) -> None:
    private, public = key_files(tmp_path)
    with pytest.raises(UserError, match="no signature by the key"):
        verify(small, "small", public)
    with pytest.raises(UserError, match=r"holds no private Ed25519 key.*openssl genpkey"):
        sign(small, "small", "root", 2, public)
    wrong = generate_private_key(SECP256R1()).private_bytes(
        keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption()
    )
    (tmp_path / "ec.pem").write_bytes(wrong)
    with pytest.raises(UserError, match="holds no private Ed25519 key"):
        sign(small, "small", "root", 2, tmp_path / "ec.pem")
    with pytest.raises(UserError, match=r"nosuch.pem cannot be read"):
        verify(small, "small", tmp_path / "nosuch.pem")
    assert private.exists()


# ── the commands ────────────────────────────────────────────────────────────────────────────────────────────────────


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["arealflow", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
        sys.exit(0)
    return int(ended.value.code or 0), capsys.readouterr().out


def test_the_command_prints_one_root_and_fails_on_damage(
    small: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_files(tmp_path)
    code, out = call(capsys, monkeypatch, "audit", "small", "--store", small.url, "--sign", str(private))
    assert code == 0 and out.splitlines()[-1] == f"root {audit(small, 'small').root}"
    assert "until iteration 1: holds" in out
    code, out = call(capsys, monkeypatch, "audit", "small", "--store", small.url, "--verify", str(public), "--json")
    told = json.loads(out)
    assert code == 0 and told["sound"] and told["signatures"][0]["holds"]
    shard = next(entry.path for entry in entries(small, "small") if entry.path.endswith(".safetensors"))
    Path(small.uri(shard)).unlink()
    code, out = call(capsys, monkeypatch, "audit", "small", "--store", small.url, "--sign", str(private))
    assert code == 1 and out.startswith(f"{shard}: missing; also affected: loading and exporting version 0")
    assert "small: 1 files damaged" in out and len(small.children("small/signatures")) == 1


def test_the_log_is_shown_and_can_be_asked_in_sql(
    small: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = call(capsys, monkeypatch, "log", "small", "--store", small.url, "--json")
    lines = json.loads(out)
    assert code == 0 and [line["action"] for line in lines] == ["started", "tagged", "finished"]
    code, out = call(capsys, monkeypatch, "log", "small", "--store", small.url)
    assert "tag first, version 1" in out and f"{lines[0]['user']}@{lines[0]['host']}" in out
    query = "SELECT n, action, details['iterations'] AS i FROM log WHERE action <> 'tagged' ORDER BY n"
    rows = run_sql(small, "small", query).to_pylist()
    assert rows == [{"n": 1, "action": "started", "i": "0"}, {"n": 3, "action": "finished", "i": "2"}]


def test_recipes_can_be_asked_in_sql(small: Store) -> None:
    query = "SELECT run, segment, from_iteration, recipe->>'$.rollout.group_size' AS size FROM segments"
    [row] = run_sql(small, "small", query).to_pylist()
    assert row == {"run": "small", "segment": 0, "from_iteration": 0, "size": "2"}
    assert load_run(small, "small").segments[0].recipe["rollout"]["group_size"] == 2
