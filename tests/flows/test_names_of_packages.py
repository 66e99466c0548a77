"""A user's folder with packages of the same names as arealflow's: it is said, and arealflow finds its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealflow.packages import INSTALLED, PACKAGES, namesakes, note
from flows.cli import doctor
from flows.home import add_import_folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Prefect's usual layout."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("")
    return tmp_path


def run(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command], cwd=project, env=kept | environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_command_ends_readably_where_pythonpath_hides_a_package(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "package":
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    else:
        (tmp_path / f"{name}.py").write_text("")
    # the checkout's root, too, as a wheel's folder is on Python's path: the first one wins
    path = os.pathsep.join((str(tmp_path), str(INSTALLED)))
    done = run(tmp_path, "-P", "-m", "arealflow.command", "run", "quickstart", PYTHONPATH=path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: Python finds {tmp_path / name}")
    assert f"instead of arealflow's own package '{name}'" in done.stderr
    assert f"take {tmp_path} out of PYTHONPATH" in done.stderr


def test_so_does_a_notebook_that_is_started_there(project: Path) -> None:
    script = "import arealflow\ntry:\n    arealflow.connect('run')\nexcept ImportError as error:\n    print(error)"
    done = run(project, "-c", script)  # -c puts the current folder first, as a notebook does
    assert f"Python finds {project / 'flows'} instead" in done.stdout, done.stderr


def test_the_commands_own_processes_find_their_own(project: Path) -> None:
    (project / "store").mkdir()
    done = run(project, "-P", "-m", "arealflow.command", "runs", "--store", "store", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, []), done.stderr


def test_a_folder_of_the_users_comes_after_arealflow_also_in_child_processes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "schemas").mkdir()  # no __init__.py: found before an editable install, too
    (project / "mine.py").write_text("")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(INSTALLED))])
    add_import_folder(project)
    assert sys.path[-1] == str(project)
    check = "import flows.home, schemas.errors, mine; print(mine.__file__)"
    done = run(project, "-P", "-c", check, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout.strip() == str(project / "mine.py"), done.stderr


def test_up_deploy_and_doctor_say_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert namesakes(project) == ["flows"] and note(Path()).startswith(f"flows/ in {project} and arealflow")
    [row] = doctor.same_names()
    assert row["state"] == "note" and row["detail"].startswith("rename flows/: ")
    monkeypatch.chdir(INSTALLED)
    assert doctor.same_names() == [] and note(INSTALLED) == ""
