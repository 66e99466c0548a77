"""The page of a report and its command, without a browser: its size, that it is harmless, and what is printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import Row, make_run, rows, store_of
from typer.testing import CliRunner

from areal_tasks.report import page
from areal_tasks.report.page import MODULES, bundle, make_page, policy, render, to_json
from areal_tasks.store.backend import Store
from flows.cli.main import app
from schemas.errors import UserError

ASSETS = Path(page.__file__).parent / "assets"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path)


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limit", [150_000, 300_000])
def test_the_page_is_no_larger_than_asked_for(store: Store, limit: int) -> None:
    make_run(store, "a", [rows(k, 40, prompt="é" * 1000) for k in range(4)])
    make_run(store, "b", [rows(k, 40) for k in range(4)])
    html, report = make_page(store, ["a", "b"], samples=200, max_bytes=limit)
    assert len(html.encode()) <= limit
    counts = [len(run["samples"]) for run in report.payload["runs"]]
    assert report.embedded == sum(counts) and 0 < counts[0] < 192 and counts[1] > counts[0]
    kept = {i for s in report.payload["runs"][0]["samples"] for i in s["tokens"]["ids"]}
    assert report.payload["runs"][0]["vocabulary"].keys() == kept


def test_a_page_that_cannot_fit_says_what_to_do(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    with pytest.raises(UserError, match="--max-mb"):
        make_page(store, ["a"], 400, 50_000)


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.none()))
def test_data_is_json_that_holds_no_markup(value: Row) -> None:
    text = to_json(value)
    assert json.loads(text) == value
    assert not re.search("[<>&\u2028\u2029]", text)


def test_hostile_texts_stay_inside_the_data(store: Store) -> None:
    hostile = "</script><script>hacked=1</script><!-- {{script}} --><img src=x onerror=hacked=1>"
    make_run(store, "a", [rows(0, prompt=hostile, completion=hostile, detail=hostile)])
    html, _ = make_page(store, ["a"], 400, 5_000_000)
    assert html.count("</script>") == 2 and html.count("<script") == 2 and "<img" not in html and "<!--" not in html
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert data is not None and json.loads(data[1])["runs"][0]["samples"][0]["prompt"] == hostile


def test_a_run_cannot_name_itself_into_the_page() -> None:
    assert "<title>&lt;b&gt;&amp;&quot;</title>" in render('<b>&"', "{}")


def test_the_policy_allows_this_script_and_style_and_nothing_else() -> None:
    html = render("t", "{}")
    made = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert made is not None and made[1] == policy(bundle(), (ASSETS / "style.css").read_text())
    assert made[1].startswith("default-src 'none'") and "unsafe" not in made[1] and "http" not in made[1]


@pytest.mark.parametrize("name", MODULES)
def test_no_module_reads_markup_or_reaches_out(name: str) -> None:
    text = (ASSETS / name).read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp|import\(", text
    )
    assert set(re.findall(r"https?://[^\s\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert len(text.splitlines()) < 400


def test_modules_can_share_one_scope() -> None:
    names = re.findall(r"^(?:const|let|function) (\w+)", bundle(), re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert {path.name for path in ASSETS.glob("*.js")} == set(MODULES)
    assert not re.search(r"^(import|export) ", bundle(), re.MULTILINE)


def test_a_report_needs_neither_torch_nor_prefect(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    code = (
        "import sys; from areal_tasks.report.page import make_page; from areal_tasks.store.backend import open_store\n"
        f"html, report = make_page(open_store({store.url!r}), ['a'], 400, 5_000_000)\n"
        "assert report.payload['runs'][0]['vocabulary'], report\n"
        "print(sorted({'torch', 'prefect', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_writes_a_page_and_says_how_large_it_is(store: Store, tmp_path: Path) -> None:
    make_run(store, "a", [rows(0)])
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", "a", "--out", str(out), "--samples", "5", "--store", store.url])
    assert done.exit_code == 0, done.output
    size = out.stat().st_size / 1e6
    assert f"{out}: {size:.2f} MB, 5 of 16 samples." in done.output
    assert "a: Unfinished: 1 of 3 iterations are committed." in done.output
    assert out.read_text().startswith("<!doctype html>")


def test_mistakes_are_named(store: Store, tmp_path: Path) -> None:
    make_run(store, "a", [rows(0)])
    unknown = CliRunner().invoke(app, ["report", "b", "--store", store.url])
    assert isinstance(unknown.exception, UserError) and "no run 'b'" in str(unknown.exception)
    nowhere = str(tmp_path / "missing" / "page.html")
    unwritten = CliRunner().invoke(app, ["report", "a", "--out", nowhere, "--store", store.url])
    assert isinstance(unwritten.exception, UserError) and nowhere in str(unwritten.exception)
