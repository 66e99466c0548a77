"""The `arealflow` command: a person's mistake is one message, exit code 1, and no traceback."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from stage_driver import finished, store_in, tiny
from waiting import wait_until

from areal_tasks.store.backend import open_store
from flows.cli import automations, machine, main, processes, start
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that holds the run `small` of two iterations."""
    folder = tmp_path_factory.mktemp("small")
    changes = {"schedule": {"iterations": 2}, "evaluation": {"every": 0, "limit": 0, "max_new_tokens": 256}}
    finished(folder, "small", tiny(**changes))
    return store_in(folder).url


class Outcome:
    """What a command printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> Outcome:
    monkeypatch.setattr(sys, "argv", ["arealflow", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
        sys.exit(0)
    assert isinstance(ended.value.code, int | None)
    printed = capsys.readouterr()
    return Outcome(ended.value.code or 0, printed.out, printed.err)


Mistake = tuple[list[str], list[str]]
MISTAKES: dict[str, Mistake] = {
    "unknown recipe": (["run", "nosuch"], ["unknown recipe 'nosuch'", "quickstart"]),
    "misspelt recipe": (["plan", "quickstrat"], ["did you mean 'quickstart'?"]),
    "bad recipe": (["run", "quickstart", "rollout.groups=0"], ["rollout.groups: should be greater than or equal to 1"]),
    "no override": (["plan", "quickstart", "groups"], ["'groups' is not of the form section.field=value"]),
    "two stores": (
        ["run", "quickstart", "--store", "/a", "store.url=/b"],
        ["--store /a and store.url=/b name two stores"],
    ),
    "run without threads": (
        ["run", "gsm8k"],
        ["`arealflow up gsm8k`", "`prefect deployment run rlhf/gsm8k`", "launcher.type=local"],
    ),
    "store of a run": (["run", "quickstart", "--store", "{file}"], ["a file stands where a folder should be"]),
    "unknown run": (["sql", "nosuch", "SELECT 1", "--store", "{url}"], ["no run 'nosuch'", "Runs there: small"]),
    "no run's name": (["sql", "../x", "SELECT 1", "--store", "{url}"], ["'../x' cannot name a run"]),
    "run to plan": (["plan", "quickstart", "run=nosuch", "--store", "{url}"], ["no run 'nosuch'"]),
    "change of a replay": (
        ["replay", "small", "--from", "verify", "reward.verifer=x", "--store", "{url}"],
        ["recipe 'small' with reward.verifer=x cannot be used", "did you mean 'verifier'?"],
    ),
    "change of a fork": (
        ["fork", "small", "--at", "1", "trainer.lrr=1", "--store", "{url}"],
        ["recipe 'small' with trainer.lrr=1 cannot be used", "did you mean 'lr'?"],
    ),
    "fork of that name": (["fork", "small", "--at", "1", "run=small", "--store", "{url}"], ["'small' exists"]),
    "SQL column": (
        ["sql", "small", "SELECT nosuch FROM samples", "--store", "{url}"],
        ["nosuch", "Views of run 'small'"],
    ),
    "SQL grammar": (["sql", "small", "SELEC 1", "--store", "{url}"], ["syntax error", "SELEC"]),
    "SQL that writes": (["sql", "small", "DROP VIEW samples", "--store", "{url}"], ["a single SELECT"]),
    "store's scheme": (["runs", "--store", "http://x"], ["'http://x' is not supported", "s3://bucket/prefix"]),
    "store is a file": (["runs", "--store", "{file}"], ["a file stands where a folder should be"]),
    "no S3 keys": (["runs", "--store", "s3://bucket/x"], ["AWS_ACCESS_KEY_ID is not set"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(
    mistake: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    (tmp_path / "file").write_text("x")
    words, expected = MISTAKES[mistake]
    places = {"{url}": url, "{file}": (tmp_path / "file").as_uri()}
    found = call(capsys, monkeypatch, *(places.get(word, word) for word in words))
    assert found.code == 1
    assert found.err.startswith("error: ") and "Traceback" not in found.err
    for part in expected:
        assert part in found.err


def test_a_store_that_cannot_be_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    found = call(capsys, monkeypatch, "sql", "small", "SELECT 1", "--store", "s3://bucket/x")
    assert found.code == 1
    assert "s3://bucket/x at http://127.0.0.1:1 cannot be reached" in found.err and "Traceback" not in found.err


def test_answers_as_json_and_csv(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    query = "SELECT iteration, count(*) AS n FROM samples GROUP BY 1 ORDER BY 1"
    found = call(capsys, monkeypatch, "sql", "small", query, "--store", url, "--json")
    assert json.loads(found.out) == [{"iteration": 0, "n": 16}, {"iteration": 1, "n": 16}]
    found = call(capsys, monkeypatch, "sql", "small", query, "--store", url, "--csv")
    assert list(csv.reader(io.StringIO(found.out))) == [["iteration", "n"], ["0", "16"], ["1", "16"]]


def test_lists_and_maps_are_json_in_both(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "l": ("['a', NULL]", ["a", None]),
        "m": ("MAP {'x': [MAP {1: 0}], 'y': [MAP {2: 3}]}", {"x": [{"1": 0}], "y": [{"2": 3}]}),
        "s": ("{'d': DATE '2026-01-02', 'e': MAP {}}", {"d": "2026-01-02", "e": {}}),
        "n": ("NULL::INTEGER[]", None),
    }
    query = f"SELECT {', '.join(f'{text} AS {name}' for name, (text, _) in values.items())}, 7 AS z"
    expected = {name: value for name, (_, value) in values.items()}
    found = call(capsys, monkeypatch, "sql", "small", query, "--store", url, "--json")
    assert json.loads(found.out) == [expected | {"z": 7}]
    found = call(capsys, monkeypatch, "sql", "small", query, "--store", url, "--csv")
    [row] = csv.DictReader(io.StringIO(found.out))
    assert {name: json.loads(cell or "null") for name, cell in row.items()} == expected | {"z": 7}


def test_an_answer_wider_than_the_terminal_is_printed_column_by_column(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, vertical in ((30, False), (90, True)):
        query = f"SELECT repeat('x', {width}) AS a, repeat('y', {width}) || chr(10) || 'z' AS b FROM range(2)"
        found = call(capsys, monkeypatch, "sql", "small", query, "--store", url).out
        assert (f"a: {'x' * width}\nb: {'y' * width}\n    z\n── row 2" in found) == vertical


def test_a_text_is_shown_as_it_is(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = call(capsys, monkeypatch, "sql", "small", "SELECT '[red]x[/red] [/]' AS t", "--store", url)
    assert found.code == 0 and "[red]x[/red] [/]" in found.out


def test_runs_and_their_state(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = json.loads(call(capsys, monkeypatch, "runs", "--store", url, "--json").out)
    assert (row["name"], row["flow"], row["iterations"], row["planned"]) == ("small", "rlhf", 2, 2)


def test_a_folder_without_a_store_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = call(capsys, monkeypatch, "runs", "--store", str(tmp_path / "none"), "--json")
    assert found.code == 1 and f"there is no store at {(tmp_path / 'none').as_uri()}" in found.err
    assert call(capsys, monkeypatch, "runs", "--store", str(tmp_path), "--json").out == "[]\n"
    monkeypatch.setenv("AREALFLOW_STORE", str(tmp_path / "none"))
    found = call(capsys, monkeypatch, "runs", "--json")
    assert (found.code, found.out) == (0, "[]\n") and "no store" in found.err and "yet" in found.err


def test_a_store_is_named_by_its_folder_wherever_one_is_named(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(urlsplit(url).path)
    monkeypatch.chdir(folder.parent)
    for named in (str(folder), folder.name, f"./{folder.name}/"):
        [row] = json.loads(call(capsys, monkeypatch, "runs", "--store", named, "--json").out)
        assert row["name"] == "small"
        found = call(capsys, monkeypatch, "plan", "quickstart", "run=small", f"store.url={named}", "--json")
        assert any(row["last committed"].startswith("small/") for row in json.loads(found.out))
        monkeypatch.setenv("AREALFLOW_STORE", named)
        assert json.loads(call(capsys, monkeypatch, "sql", "small", "SELECT 1 AS x", "--json").out) == [{"x": 1}]
        assert processes.environment("http://x")["AREALFLOW_STORE"] == url


def test_a_plan_says_what_is_committed(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("plan", "quickstart", "run=small", "schedule.iterations=3", "--store", url, "--json")
    found = call(capsys, monkeypatch, *arguments)
    rows = {row["stage"]: row for row in json.loads(found.out)}
    assert rows["initialise"]["next"].startswith("reused: small/") and rows["rollout"]["next"] == "built"
    assert rows["rollout"]["last committed"].startswith("small/iteration=000001/stage=rollout/")
    assert (rows["train"]["kind"], rows["rollout"]["kind"]) == ("TRAIN_STEP", "GENERATE")


def test_the_doctor_fails_where_the_store_is_not_usable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    (tmp_path / "file").write_text("x")
    for place, state in ((tmp_path / "store", "ok"), (tmp_path / "file", "BROKEN")):
        found = call(capsys, monkeypatch, "doctor", "--store", place.as_uri(), "--json")
        text = found.out[found.out.index("[\n") :]
        assert {row["what"]: row["state"] for row in json.loads(text)}["store"] == state
        assert found.code == (state == "BROKEN")
    assert not (tmp_path / "store").exists(), "the doctor leaves nothing behind"
    (tmp_path / "store" / "run").mkdir(parents=True)
    call(capsys, monkeypatch, "doctor", "--store", str(tmp_path / "store"), "--json")
    assert [path.name for path in (tmp_path / "store").rglob("*")] == ["run"]


def test_no_command_waits_for_torch_or_prefect_before_it_has_checked_what_it_was_given() -> None:
    every = "from flows.cli.main import COMMANDS, load_command; [load_command(name) for name in COMMANDS]"
    check = f"import sys; {every}; sys.exit(str({{'torch', 'transformers', 'prefect'}} & sys.modules.keys() or ''))"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stderr.strip() == ""


def test_a_command_imports_no_other() -> None:
    check = "from flows.cli.main import load_command; load_command('log')"
    seen = f"import sys; {check}; print(*(name for name in sys.modules if name.startswith('flows.cli.')))"
    found = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True).stdout.split()
    assert "flows.cli.history" in found and not {"flows.cli.compare", "flows.cli.machine", "flows.cli.retention"} & set(
        found
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("store.url=file:///etc/hostname/x", "a file stands where a folder should be"),
        ("data.source=/no/such/{split}.jsonl", "there is no such file"),
        ("reward.verifier=nosuch:judge", "there is no module 'nosuch'"),
        ("rollout.groups=0", "should be greater than or equal to 1"),
    ],
)
def test_a_mistake_that_needs_no_engine_is_told_before_anything_large_is_imported_or_started(
    override: str, expected: str, tmp_path: Path
) -> None:
    program = """
import sys
from flows.cli import main
started = []
sys.addaudithook(lambda event, arguments: started.append(arguments) if event == "subprocess.Popen" else None)
try:
    main.main()
finally:
    print({"torch", "transformers", "prefect", "pandas", "aiohttp"} & sys.modules.keys(), started)
"""
    command = [sys.executable, "-c", program, "run", "quickstart", override]
    environment = os.environ | {"AREALFLOW_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (1, "set() []"), found.stderr
    assert expected in found.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.verifier=mine:nosuch"], "has no 'nosuch'"),
        (["reward.verifier=mine:score", "reward.arguments={wrong: 1}"], "unexpected keyword argument 'wrong'"),
        (["reward.verifier=exact", "reward.arguments={wrong: 1}"], "unexpected keyword argument 'wrong'"),
        (["reward.verifier=broken:score"], "importing broken fails with SyntaxError"),
        (["workflow.name=nosuch:wf"], "nosuch cannot be imported"),
        (["workflow.name=broken:wf"], "importing broken fails with SyntaxError"),
    ],
)
def test_a_mistake_in_the_users_code_is_told_before_a_server_is_started(
    overrides: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, answer): return 1.0\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(start, "run_recipe", lambda recipe, name: pytest.fail("the flow begins"))
    found = call(capsys, monkeypatch, "run", "quickstart", *overrides)
    assert found.code == 1 and found.err.startswith("error: ") and expected in found.err


def test_s3_keys_that_prefect_cannot_have_are_missed_before_a_server_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    begun: list[str] = []

    def run_recipe(recipe: Recipe, name: str) -> dict[str, Any]:
        begun.append(name)
        raise UserError("begun")

    monkeypatch.setattr(start, "run_recipe", run_recipe)
    asked = ("run", "quickstart", "store.url=s3://bucket/x", "run=mine")
    assert "AWS_ACCESS_KEY_ID is not set" in call(capsys, monkeypatch, *asked).err and not begun
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    call(capsys, monkeypatch, *asked)
    monkeypatch.delenv("PREFECT_API_URL")
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").touch()
    call(capsys, monkeypatch, *asked)
    assert begun == ["mine", "mine"], "the server or the database may have keys"


def test_a_run_in_a_store_that_an_option_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def run_recipe(recipe: Recipe, name: str) -> dict[str, Any]:
        begun.append(recipe.store.url)
        return {"run": name, "iterations": 1, "store": open_store(recipe.store.url).url}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(start, "run_recipe", run_recipe)
    for words in (("--store", "null #"), ("--store", "b", "store.url=./b"), ("store.url=b",)):
        found = call(capsys, monkeypatch, "run", "quickstart", "run=mine", *words)
        assert found.code == 0 and found.out.endswith(f"--store {shlex.quote(open_store(begun[-1]).url)}\n")
    assert begun == ["null #", "b", "b"]
    monkeypatch.setenv("AREALFLOW_STORE", str(tmp_path / "b"))
    found = call(capsys, monkeypatch, "run", "quickstart", "run=mine")
    assert found.out.endswith("arealflow report mine\n")


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(capsys, monkeypatch, "adit", "small")
    assert found.code == 2 and "Did you mean 'audit'?" in found.err


def test_a_misspelt_stage_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(capsys, monkeypatch, "replay", "small", "--from", "verfy")
    assert found.code == 2 and "'verfy' is not one of 'verify'" in found.err


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_taken_port_is_passed_over_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = machine.free_port(port)
    assert found > port
    assert f"port {port} is taken; using {found}" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_up_tells_a_terminal_the_password_and_a_log_the_file_that_holds_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    processes.make_login()
    monkeypatch.setattr(machine, "start", lambda port, recipes: "http://127.0.0.1:4207/api")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    machine.up()
    login, file = os.environ[processes.LOGIN], processes.login_file()
    assert (
        capsys.readouterr().out == f"Prefect UI: http://127.0.0.1:4207\nits password: {login if terminal else file}\n"
    )
    assert file.read_text() == login


def test_all_ports_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(port: int) -> int:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(machine, "probe_port", taken)
    with pytest.raises(UserError, match="ports 4200 to 4249 are all taken; name another with --port"):
        machine.free_port(4200)


def test_a_prefect_server_that_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(
        machine, "server_command", lambda url: [sys.executable, "-c", "raise SystemExit('no disk left')"]
    )
    monkeypatch.setattr(machine, "free_port", lambda first: 1)
    with pytest.raises(
        UserError, match=r"(?s)the Prefect server did not start; last lines of .*server.log:\nno disk left"
    ):
        machine.start()
    assert not processes.running()


def test_a_port_that_another_takes_meanwhile_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    tried: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        passes = iter([port])  # it looked free when we asked
        look = machine.free_port
        monkeypatch.setattr(machine, "free_port", lambda first: next(passes, None) or look(first))
        monkeypatch.setattr(machine, "spawn", lambda name, command, url: psutil.Process())
        monkeypatch.setattr(machine, "end", lambda processes: None)

        def second(url: str, server: psutil.Process) -> bool:
            tried.append(url)
            return len(tried) > 1

        monkeypatch.setattr(machine, "answers", second)
        found = machine.start_server(port)
    assert len(tried) == 2 and tried[0] == f"http://127.0.0.1:{port}/api" != tried[1] == found


WAITS = "waiting for another `arealflow up` or `down` to end"


def test_of_two_ups_at_once_the_second_finds_what_the_first_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    begun: list[int] = []
    said: list[str] = []
    url = "http://127.0.0.1:4207/api"

    def start_server(port: int) -> str:
        begun.append(port)
        wait_until(lambda: WAITS in said, "the other `up`")
        return url

    def echo(text: str) -> None:
        said.append(text)

    monkeypatch.setattr(machine, "echo", echo)
    monkeypatch.setattr(machine, "start_server", start_server)
    monkeypatch.setattr(machine, "running", lambda: url if begun else "")
    monkeypatch.setattr(machine, "spawn", lambda name, command, url: None)
    monkeypatch.setattr(machine, "answers", lambda url: True)
    monkeypatch.setattr(automations, "install", lambda url: None)
    monkeypatch.setattr(machine, "deploy_all", lambda recipes, url: None)
    ups = [threading.Thread(target=machine.start) for _ in range(2)]
    for one in ups:
        one.start()
    for one in ups:
        one.join()
    assert len(begun) == 1 and said.count(WAITS) == 1


def test_a_prefect_server_that_is_named_and_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    found = call(capsys, monkeypatch, "run", "quickstart")
    assert found.code == 1
    assert "error: no Prefect server answers at http://127.0.0.1:1/api" in found.err and "Traceback" not in found.err
    for url, said in (
        ("http://127.0.0.1:1/api", "no Prefect server answers"),
        ("http://127.0.0.1:42oo", "Invalid port"),
    ):
        monkeypatch.setenv("PREFECT_API_URL", url)
        found = call(capsys, monkeypatch, "doctor", "--store", str(tmp_path / "store"))
        assert found.code == 1 and said in " ".join(found.out.split())
