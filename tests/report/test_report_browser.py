"""The report in a real browser: what a reader does with it, and that no text in it does anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from report_runs import WORDS, Row, make_run, sample, store_of
from waiting import LIMIT

from areal_tasks.report.page import make_page, make_report, render, to_json
from areal_tasks.store.backend import Store
from areal_tasks.store.opening import open_run
from schemas.recipe.load import load_recipe

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}

HOSTILE = (
    "</script><script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    "<svg/onload=hacked=1>\"'><b id=injected>bold</b>",
    "\u202eright to left\u2066 \u0000\u0007\u001b[31m \u007f \u200b\ufeff \u2028 \U000e0041",
    "javascript:hacked=1 ${hacked=1} {{script}} <!-- -->",
    "w" * 5000,
    "👩‍👩‍👧‍👦 مرحبا 漢字 e\u0301",
)


class Opened:
    """A page in the browser, and everything that went wrong or left the machine while it was open."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))

    def rows(self) -> list[str]:
        """The texts of the listed samples."""
        return self.page.locator("#rollouts .row").all_inner_texts()

    def set(self, name: str, value: str) -> None:
        """Set a filter."""
        field = self.page.locator(f"#rollouts [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def store(folder: Path) -> Store:
    """Runs: `plain` and `other` of three iterations, `long` of eight, `hostile`, and `empty` without a commit."""
    made = store_of(folder)
    make_run(made, "plain", [[sample(k, i) for i in range(8)] for k in range(3)], evaluate=False)
    make_run(made, "other", [[sample(k, i, reward=0.5) for i in range(4)] for k in range(3)], "trainer.lr=1e-3")
    make_run(made, "long", [[sample(k, i) for i in range(4)] for k in range(8)])
    make_run(made, "hostile", [hostile_rows()], evaluate=False)
    open_run(made, "empty", load_recipe("quickstart", []))
    return made


def hostile_rows() -> list[Row]:
    ids = [*range(len(WORDS)), *range(len(WORDS))]
    tokens: dict[str, Any] = {
        "input_ids": ids,
        "loss_mask": [True] * len(ids),
        "num_tokens": len(ids),
        **{name: [0.5] * len(ids) for name in ("logprobs", "advantages", "returns")},
        "versions": [0] * len(ids),
        "stale_kv": [False] * len(ids),
    }
    texts = [dict.fromkeys(("prompt", "completion", "answer", "parsed", "detail"), text) for text in HOSTILE]
    return [sample(0, i, **text, **tokens, server=text["prompt"][:200]) for i, text in enumerate(texts)]


@pytest.fixture
def show(browser: Browser, store: Store, folder: Path) -> Iterator[Any]:
    """Opens the report on some runs; afterwards nothing may have failed, and nothing may have been asked for."""
    contexts = []

    def opened(*names: str, size: dict[str, int] = WIDE, dark: bool = False) -> Opened:
        target = folder / f"{'-'.join(names)}.html"
        if not target.exists():
            target.write_text(make_page(store, names, 400, 5_000_000)[0], encoding="utf-8", newline="")
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")  # type: ignore[arg-type]
        context.set_default_timeout(1000 * LIMIT)
        contexts.append((context, seen := Opened(context.new_page())))
        seen.page.goto(target.as_uri())
        expect(seen.page.locator(".plot:empty")).to_have_count(0)  # charts are drawn with the first frame
        return seen

    yield opened
    for context, seen in contexts:
        context.close()
        assert seen.errors == []
        assert [url for url in seen.requests if not url.startswith("file://")] == [] and len(seen.requests) == 1


def titles(page: Page) -> Sequence[str]:
    return page.locator("#curves h3").all_inner_texts()


# ── curves ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_curves_are_drawn_and_read_by_pointer_and_keys(show: Any) -> None:
    page = show("plain").page
    assert {"Reward", "KL", "Entropy", "Clip fraction", "Gradient norm", "Time per stage"} <= set(titles(page))
    loss = page.locator("#chart-loss")
    assert loss.locator("path.line").get_attribute("d").count("L") == 2
    expect(loss.locator(".readout")).to_contain_text("0.3333 at 2")
    loss.locator(".plot").focus()
    page.keyboard.press("Home")
    expect(loss.locator(".readout")).to_contain_text("1 (1 … 1) at 0")
    expect(page.locator("#chart-reward .readout")).to_contain_text("0.5 at 0")
    page.keyboard.press("ArrowRight")
    expect(loss.locator(".readout")).to_contain_text("0.5 (0.5 … 0.5) at 1")
    page.keyboard.press("Escape")
    expect(loss.locator(".readout")).to_contain_text("0.3333 at 2")
    box = loss.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + 52, box["y"] + 60)
    expect(loss.locator(".readout")).to_contain_text("at 0")


def test_a_point_of_a_chart_leads_to_its_samples(show: Any) -> None:
    seen = show("plain")
    seen.page.locator("#chart-loss .plot").focus()
    seen.page.keyboard.press("Home")
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("Enter")
    assert len(seen.rows()) == 8 and all("iteration 1" in row for row in seen.rows())


def test_a_single_iteration_is_a_bar_of_stages(show: Any) -> None:
    page = show("hostile").page
    area = page.locator("#chart-stages-0 path.area").first.get_attribute("d") or ""
    corners = [point.split()[0] for point in area[1:-1].split("L")]
    assert len(corners) == 4 and corners == [corners[0], corners[1], corners[1], corners[0]] != corners[:1] * 4


def test_a_logarithmic_axis_is_switched(show: Any) -> None:
    page = show("plain").page
    loss = page.locator("#chart-loss")
    before = loss.locator(".tick").all_text_contents()
    toggle = loss.get_by_role("button", name="log")
    expect(toggle).to_have_attribute("aria-pressed", "false")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "true")
    assert loss.locator(".tick").all_text_contents() != before
    assert page.locator("#chart-accuracy button").count() == 0


def test_smoothing_changes_lines_and_not_the_values_read(show: Any) -> None:
    page = show("long").page
    line = page.locator("#chart-loss path.line")
    paths = ("#chart-loss path.line", "#chart-accuracy path.c1")
    before, few = (page.locator(path).get_attribute("d") for path in paths)
    page.locator("#smooth").select_option("5")
    assert line.get_attribute("d") != before
    assert page.locator("#chart-accuracy path.c1").get_attribute("d") == few  # one evaluation has no neighbours
    expect(page.locator("#chart-loss .readout")).to_contain_text("0.125 at 7")


def edited(folder: Path, store: Store, name: str, run: str, curves: dict[str, list[dict[str, Any]]]) -> str:
    """A page about `run` whose charts have these lines instead of their own; its name for `show`."""
    payload = make_report(store, [run], 10, 5_000_000).payload
    payload["runs"][0]["curves"] |= curves
    (folder / f"{name}.html").write_text(render(name, to_json(payload)), encoding="utf-8", newline="")
    return name


def bars(**stages: list[float]) -> dict[str, list[dict[str, Any]]]:
    """The chart of times per stage, in the order of these stages."""
    return {"stages": [{"name": name, "x": list(range(len(y))), "y": y} for name, y in stages.items()]}


def test_a_stage_has_its_colour_whatever_its_rank(show: Any, store: Store, folder: Path) -> None:
    several = [bars(train=[3], rollout=[2], odd=[1]), bars(odd=[9], rollout=[2], verify=[1.5], train=[1])]
    colours = []
    for i, chart in enumerate(several):
        page = show(edited(folder, store, f"colours-{i}", "plain", chart)).page
        drawn = page.locator("#chart-stages-0 path.area").evaluate_all("all => all.map(area => area.classList[1])")
        colours.append(dict(zip((line["name"] for line in chart["stages"]), drawn, strict=True)))
    one, other = colours
    assert one == {name: other[name] for name in one} and len(set(other.values())) == 4


def test_few_bars_are_drawn_whole(show: Any, store: Store, folder: Path) -> None:
    page = show(edited(folder, store, "two-bars", "plain", bars(rollout=[10, 0.5]))).page
    ticks = [float(text) for text in page.locator("#chart-stages-0 .tick").all_text_contents()]
    assert max(ticks) >= 8 and page.locator("#chart-stages-0 .cut").count() == 0


def test_a_bar_that_is_cut_off_is_marked_with_its_value(show: Any, store: Store, folder: Path) -> None:
    chart = bars(rollout=[1.0] * 100 + [40.0] + [1.0] * 98 + [70.0], train=[0.5] * 200)
    page = show(edited(folder, store, "cut", "plain", chart)).page
    marks = page.locator("#chart-stages-0 .cut").all_text_contents()
    assert marks == ["▲", "40.5 s", "▲", "70.5 s"]
    right, edge = (page.locator(f"#chart-stages-0 {what}").last.bounding_box() for what in (".cut", ".plot svg"))
    assert right["x"] + right["width"] <= edge["x"] + edge["width"] and right["y"] >= edge["y"]


def test_bars_cut_off_close_together_share_a_value(show: Any, store: Store, folder: Path) -> None:
    page = show(edited(folder, store, "close", "plain", bars(rollout=[30.0, 50.0, *[1.0] * 198]))).page
    assert page.locator("#chart-stages-0 .cut").all_text_contents() == ["▲", "▲", "≤ 50 s"]


def test_zeros_on_a_logarithmic_axis_are_drawn_on_a_linear_one(show: Any, store: Store, folder: Path) -> None:
    zeros = [{"name": "", "x": [0, 1, 2], "y": [0, 0, 0], "lo": [0, 0, 0], "hi": [0, 0, 0]}]
    chart = show(edited(folder, store, "zeros", "plain", {"grad_norm": zeros})).page.locator("#chart-grad_norm")
    expect(chart).not_to_contain_text("Nothing to draw")
    assert (chart.locator("path.line").get_attribute("d") or "").count("L") == 2
    assert "0" in chart.locator(".tick").all_text_contents()


def test_a_value_is_not_split_between_lines(show: Any, store: Store, folder: Path) -> None:
    name = "a line whose name fills the whole width of a card"
    accuracy = {"accuracy": [{"name": name, "x": [0, 1, 2], "y": [0.5, 0.5, 0.777]}]}
    page = show(edited(folder, store, "long-name", "plain", accuracy), size=NARROW).page
    value = page.locator("#chart-accuracy .readout b")
    assert value.text_content() == "77.7 %"
    lines = "value => value.getBoundingClientRect().height / parseFloat(getComputedStyle(value).lineHeight)"
    assert value.evaluate(lines) < 1.5


def test_the_cost_of_each_run_is_shown(show: Any) -> None:
    page = show("plain", "other", "empty").page
    assert page.locator("#cost h3").all_inner_texts() == ["plain", "other"]
    expect(page.locator("#cost article").first).to_contain_text("1 start of the flow, until its last commit")
    assert {"rollout", "train"} <= set(page.locator("#cost article").first.locator("td:first-child").all_inner_texts())


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_samples_are_filtered(show: Any) -> None:
    seen = show("plain")
    assert len(seen.rows()) == 24
    expect(seen.page.locator("#count")).to_have_text("24 of the 24 samples in this page, which were chosen from 24.")
    for filters, count in (
        ({"verdict": "correct"}, 12),
        ({"least": "0.5"}, 12),
        ({"most": "0.5", "from": "1", "to": "1"}, 4),
        ({"search": "COMPLETION 2 7"}, 1),
        ({"prompt": "1"}, 12),
        ({"search": "nowhere"}, 0),
    ):
        for name, value in filters.items():
            seen.set(name, value)
        assert len(seen.rows()) == count, filters
        seen.page.get_by_role("button", name="reset filters").click()
        assert len(seen.rows()) == 24


def test_samples_are_ordered_from_best_to_worst_and_through_time(show: Any) -> None:
    seen = show("plain")

    def rewards() -> list[str]:
        return [row.split()[0] for row in seen.rows()]

    seen.set("order", "best")
    assert rewards() == ["1"] * 12 + ["0"] * 12
    seen.set("order", "worst")
    assert rewards() == ["0"] * 12 + ["1"] * 12
    seen.set("order", "oldest")
    times = [row.split("iteration ")[1][0] for row in seen.rows()]
    assert times == sorted(times) and set(times) == {"0", "1", "2"}


def test_a_sample_is_looked_at_whole_and_its_prompt_followed(show: Any) -> None:
    seen = show("plain")
    seen.set("search", "completion 1 5")
    detail = seen.page.locator("#detail")
    expect(detail.locator("h3")).to_have_text("training · iteration 1 · sample 101-1")
    expect(detail.locator("pre").nth(1)).to_have_text("completion 1 5")
    expect(detail).to_contain_text("verdict correct")
    seen.set("search", "")
    detail.get_by_role("button", name="all of prompt 1").click()
    assert len(seen.rows()) == 12 and all("prompt 1" in row for row in seen.rows())


def test_the_list_is_walked_by_arrow_keys(show: Any) -> None:
    seen = show("plain")
    rows = seen.page.locator("#rollouts .row")
    rows.nth(0).click()
    seen.page.keyboard.press("ArrowDown")
    seen.page.keyboard.press("ArrowDown")
    expect(rows.nth(2)).to_be_focused()
    expect(rows.nth(2)).to_have_attribute("aria-current", "true")
    seen.page.get_by_role("button", name="‹ previous").click()
    expect(rows.nth(1)).to_have_attribute("aria-current", "true")


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_are_coloured_by_what_is_chosen(show: Any) -> None:
    page = show("plain").page
    tokens = page.locator("#detail .tokens .token")
    assert tokens.all_text_contents() == ["hello", " world", "hello", " world", "<eos>"]

    def classes() -> list[list[str]]:
        return [c.split()[1:] for c in tokens.evaluate_all("all => all.map(token => token.className)")]

    assert classes() == [[], [], ["own", "low", "s1"], ["own", "low", "s7"], ["own"]]
    page.locator("[data-mode=adv]").click()
    assert classes()[2:] == [["own", "good", "s8"]] * 3
    page.locator("[data-mode=ver]").click()
    assert classes()[2:] == [["own", "v0", "s5"]] * 3
    expect(page.locator("#detail .legend")).to_contain_text("which weights made each token")


def test_a_token_tells_its_values_to_pointer_and_keys(show: Any) -> None:
    page = show("plain").page
    tip, strip = page.locator("#tip"), page.locator("#detail .tokens")
    expect(tip).to_be_hidden()
    strip.locator(".token").nth(3).hover()
    for told in ("id 3", "position 3", "logprob -3.25 (3.88 %)", "advantage 1.5", "version"):
        expect(tip).to_contain_text(told)
    strip.focus()
    page.keyboard.press("End")
    expect(tip).to_contain_text("id 0")
    expect(page.locator("#detail .reading")).to_contain_text("logprob -0.125")
    page.keyboard.press("Home")
    expect(tip).to_contain_text("prompt: not generated")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


# ── several runs, unusual runs, small screens ───────────────────────────────────────────────────────────────────────


def test_runs_side_by_side_are_overlaid_compared_and_hidden(show: Any) -> None:
    seen = show("plain", "other")
    reward = seen.page.locator("#chart-reward")
    assert reward.locator("path.line").count() == 2
    expect(reward.locator(".readout")).to_contain_text("plain")
    expect(seen.page.locator("#facts")).to_contain_text("trainer.lr")
    shown = len(seen.rows())
    seen.page.locator("button.chip", has_text="other").click()
    assert reward.locator("path.line").count() == 1
    assert len(seen.rows()) == 24 < shown
    seen.page.locator("button.chip", has_text="other").click()
    seen.set("run", "1")
    assert len(seen.rows()) == shown - 24
    assert "Time per stage · other" in titles(seen.page)


def test_a_run_without_a_commit_says_so(show: Any) -> None:
    page = show("empty").page
    expect(page.locator("header.top")).to_contain_text("Nothing is committed yet")
    assert page.locator("#curves").count() == page.locator("#rollouts").count() == 0
    expect(page.locator("#facts")).to_contain_text("trainer.lr")


@pytest.mark.parametrize("names", [("plain",), ("plain", "other"), ("hostile",)], ids="-".join)
def test_a_narrow_screen_shows_everything_without_scrolling_sideways(show: Any, names: tuple[str, ...]) -> None:
    page = show(*names, size=NARROW, dark=True).page
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    assert page.locator("#detail").bounding_box()["y"] > page.locator("#rollouts .list").bounding_box()["y"] + 100
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


# ── hostile texts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_hostile_texts_are_shown_and_do_nothing(show: Any) -> None:
    seen = show("hostile")
    page = seen.page
    for number, text in enumerate(HOSTILE):
        seen.set("search", f"{number // 4}-{number % 4}")
        page.locator("#rollouts .row").click()
        page.locator("#detail .token").nth(1).hover()
        shown = set(page.locator("#detail pre").all_inner_texts())
        assert shown == {text} or (number == 3 and len(shown) == 1)  # what it shows instead: the next test
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("#injected, main img, main script, main svg[onload]").count() == 0


def test_what_cannot_be_seen_is_named(show: Any) -> None:
    seen = show("hostile")
    seen.set("search", "right to left")
    text = seen.page.locator("#detail pre").first.inner_text()
    for name in ("U+202E", "U+2066", "␀", "␇", "␛", "U+007F", "U+200B", "U+FEFF", "U+2028", "U+E0041"):
        assert name in text
    assert not set(text) & set("\u202e\u2066\u0000\u0007\u001b\u007f\u200b\ufeff\u2028\U000e0041")
    assert "U+202E" in seen.page.locator("#detail .tokens").inner_text()
