"""What a report holds, without a browser: curves, chosen samples, tokens, facts; of made-up runs and of real ones."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import WORDS, Row, full, make_run, rows, sample, steps, store_of
from stage_driver import drive, tiny, tiny_evaluation, tiny_sft
from stage_driver import store_in as driven
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_tasks.engines.trainer.metrics import summary
from areal_tasks.report import samples, tokens
from areal_tasks.report.curves import _STEPS, Series, downsample, number
from areal_tasks.report.facts import differences
from areal_tasks.report.page import Payload, make_report
from areal_tasks.report.tokens import texts_of
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session, without_nan
from areal_tasks.store.run_list import list_runs
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.tables import TABLES

LARGE = 5_000_000
SCHEMA_1 = Path(__file__).parents[1] / "fixtures/schema-1/run.tar.xz"


def report_of(store: Store, *names: str, samples: int = 100) -> list[Payload]:
    runs: list[Payload] = make_report(store, names, samples, LARGE).payload["runs"]
    return runs


def line(run: Payload, chart: str, name: str = "") -> dict[str, list[float]]:
    found = [line for line in run["curves"][chart] if line["name"] == name]
    assert len(found) == 1, run["curves"].get(chart)
    return found[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path)


# ── curves ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_curves_are_those_of_the_rows(store: Store) -> None:
    lucky = [*rows(1)[:6], sample(1, 6, reward=1.0), sample(1, 7, reward=float("nan"), verdict="timeout")]
    make_run(store, "a", [rows(0), lucky, rows(2, reward=0.25, truncated=True)])
    run = report_of(store, "a")[0]
    assert line(run, "reward") == {"name": "", "x": [0, 1, 2], "y": [0.5, 0.57143, 0.25]}
    assert line(run, "accuracy", "training samples")["y"] == [0.5, 0.375, 0.5]
    assert line(run, "accuracy", "evaluation") == {"name": "evaluation", "x": [0], "y": [0.5]}
    assert line(run, "truncated", "training samples")["y"] == [0, 0, 1]
    assert line(run, "unjudged", "verifier failed")["y"] == [0, 0.125, 0]
    assert line(run, "signal")["y"] == [0, 0, 1]
    assert line(run, "grad_norm") == {"name": "", "x": [0, 1, 2], "y": [1.5] * 3, "lo": [1] * 3, "hi": [2] * 3}
    assert line(run, "gap", "greatest")["y"] == [1e-5] * 3
    assert {stage["name"] for stage in run["curves"]["stages"]} >= {"rollout", "verify", "train"}


_BROKEN = st.sampled_from([float("nan"), float("inf")])


@given(st.lists(st.tuples(st.floats(-9, 9), _BROKEN | st.none(), st.booleans()), min_size=1, max_size=6))
def test_a_skipped_step_counts_in_no_mean_as_in_the_stages_metric(made: list[tuple[float, float | None, bool]]) -> None:
    """Whether its loss is NaN, its gradient is not finite, or both are numbers; nor does a step without tokens."""
    found = []
    for value, broken, empty in made:
        measured = dict.fromkeys(("loss", "grad_norm", "entropy", "kl", "approx_kl", "clip_fraction"), value)
        bad = {} if broken is None else {"loss": float("nan"), "grad_norm": broken}
        step = steps(0)[1]
        found.append(full("train_steps", step | measured | bad | {"skipped": bool(bad), "tokens": 0 if empty else 5}))
    expected = summary(found)
    rows = pa.Table.from_pylist([row | {"iteration": 0} for row in found])
    with duckdb.connect() as connection:
        without_nan(connection.from_arrow(rows)).create_view("train_steps")
        [row] = connection.sql(_STEPS.format(x="iteration", source="train_steps")).to_arrow_table().to_pylist()
    for name, column in {**{name: name for name in measured}, "clip_fraction": "clip"}.items():
        assert row[column] == (pytest.approx(expected[name]) if name in expected else None)


def test_sql_has_null_where_tables_have_nan(store: Store) -> None:
    """In every view: one NaN would be the mean of its group."""
    nan = float("nan")
    unknown = {"reward": nan, "shaped_reward": nan, "verify_seconds": nan, "seconds": nan, "sample_loss": nan}
    make_run(store, "a", [[*rows(0)[:4], *(sample(0, i, **unknown) for i in range(4, 8))]])
    with Session(store, "a") as session:
        names = [row["name"] for row in session.sql("SHOW TABLES").to_pylist()]
        for name in names:
            table = session.sql(f"FROM {name}")
            floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
            assert not any(np.isnan(table[column].drop_null().to_numpy()).any() for column in floats), name
        [row] = session.sql("SELECT avg(reward) AS all, avg(shaped_reward) AS shaped FROM scalars").to_pylist()
    assert row == {"all": 0.5, "shaped": 0.5} and {"samples", "groups", "verify", "evaluations"} <= set(names)


def test_what_never_happened_has_no_curve(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    curves = report_of(store, "a")[0]["curves"]
    assert "dropped" not in curves and "lags" not in curves and "unjudged" not in curves
    make_run(store, "b", [rows(0, kept=False), rows(1, version_min=0)])
    curves = report_of(store, "b")[0]["curves"]
    assert curves["dropped"][0]["y"] == [1, 0]
    assert {area["name"]: area["y"] for area in curves["lags"]} == {"0": [1, 0], "1": [0, 1]}


def test_the_age_of_tokens_is_shown_where_it_was_measured(store: Store) -> None:
    ages = {"lag_mean": 1.5, "lag_max": 3.0, "stale_kv": 0.25, "effective_sample_size": 0.9, "behaviour_clipped": 0.0}
    make_run(store, "a", [rows(0), rows(1)], measured=ages)
    run = report_of(store, "a")[0]
    assert line(run, "lag", "mean")["y"] == [1.5, 1.5] and line(run, "lag", "greatest")["y"] == [3, 3]
    assert line(run, "weights", "effective sample size")["y"] == [0.9, 0.9]
    assert line(run, "weights", "capped or masked")["y"] == [0, 0]
    assert line(run, "stale_kv")["y"] == [0.25, 0.25]
    make_run(store, "plain", [rows(0)])
    assert not report_of(store, "plain")[0]["curves"].keys() & {"lag", "weights", "stale_kv"}


def test_lags_are_shares_of_the_generated_tokens_and_shown_where_there_are_any(store: Store) -> None:
    make_run(store, "synchronous", [rows(0), rows(1)])
    assert "lags" not in report_of(store, "synchronous")[0]["curves"]
    silent = sample(12, 2, num_generated=0, version_min=-1, version_max=-1)  # has no token that could be old
    late = [sample(12, 0, num_generated=9, version_min=0), sample(12, 1, num_generated=3, version_min=11), silent]
    make_run(store, "stale", [*(rows(k) for k in range(12)), late])
    found = {area["name"]: area["y"] for area in report_of(store, "stale")[0]["curves"]["lags"]}
    assert (found["1"][12], found["10 or more"][12]) == (0.25, 0.75)
    assert all(sum(area[k] for area in found.values()) == pytest.approx(1) for k in range(13))


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_thinning_keeps_the_extremes(values: list[float], points: int) -> None:
    y = np.array(values)
    thinned = downsample(Series("s", np.arange(len(y), dtype=np.float64), y), points)
    assert len(thinned.x) == min(points, len(y)) and sorted(thinned.x) == list(thinned.x)
    finite = y[np.isfinite(y)]
    if len(y) > points and len(finite):
        assert np.nanmin(thinned.low) == finite.min() and np.nanmax(thinned.high) == finite.max()


@given(st.floats())
def test_numbers_are_short_and_close(value: float) -> None:
    short = number(value)
    if not np.isfinite(value):
        assert short is None
    else:
        assert len(json.dumps(short)) <= 18
        assert short == pytest.approx(value, rel=1e-4) if short is not None else abs(value) > 1.79e308


# ── which samples ───────────────────────────────────────────────────────────────────────────────────────────────────


def why(run: Payload, kind: str) -> list[Row]:
    return [found for found in run["samples"] if kind in found["why"]]


def test_best_worst_latest_and_unjudged_samples_are_chosen(store: Store) -> None:
    history = [rows(k, 40, reward=0.5) for k in range(5)]
    history[2][7] |= {"reward": 9.0}
    history[3][1] |= {"reward": -9.0}
    history[1][3] |= {"reward": float("nan"), "verdict": "timeout"}
    history[0][5] |= {"num_generated": 4000}
    make_run(store, "a", history, evaluate=False)
    run = report_of(store, "a", samples=30)[0]
    assert len(run["samples"]) == 30 and run["available"] == 200
    assert why(run, "best")[0]["id"] == history[2][7]["sample_id"]
    assert why(run, "worst")[0]["id"] == history[3][1]["sample_id"]
    assert [(s["id"], s["reward"]) for s in why(run, "unjudged")] == [(history[1][3]["sample_id"], None)]
    assert why(run, "longest")[0]["num_generated"] == 4000
    assert {s["it"] for s in why(run, "latest")} == {4}
    assert {s["it"] for s in why(run, "random")} == {0, 1, 2, 3, 4}


def test_the_choice_does_not_change_from_report_to_report(store: Store) -> None:
    make_run(store, "a", [rows(k, 40) for k in range(3)])
    first, second = (report_of(store, "a", samples=25)[0]["samples"] for _ in range(2))
    assert first == second


def test_evaluations_are_embedded_beside_what_is_trained_on(store: Store) -> None:
    make_run(store, "a", [rows(0, 40)])
    samples = report_of(store, "a", samples=20)[0]["samples"]
    assert {s["table"] for s in samples[:4]} == {"scalars", "evaluate"}
    assert sum(s["table"] == "evaluate" for s in samples) == 4
    assert {s["evaluated"] for s in samples if s["table"] == "evaluate"} == {0}


def test_a_sample_has_what_every_table_says_of_it(store: Store) -> None:
    make_run(store, "a", [rows(0, 4, parsed="41", detail="off by one", sample_kl=0.25)], evaluate=False)
    found = report_of(store, "a")[0]["samples"]
    chosen = next(s for s in found if s["id"] == "0-1")
    assert (chosen["prompt"], chosen["parsed"], chosen["detail"]) == ("prompt 0", "41", "off by one")
    assert (chosen["reward"], chosen["shaped_reward"], chosen["sample_kl"]) == (1, 0.5, 0.25)
    assert chosen["tokens"] == {
        "ids": [2, 3, 2, 3, 0],
        "own": [[2, 3]],
        "lp": [-0.5, -3.25, -0.125],
        "adv": [1.5],
        "ver": [0],
    }


def test_no_samples_are_embedded_where_none_are_asked_for(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    assert report_of(store, "a", samples=0)[0]["samples"] == []


@given(st.lists(st.booleans(), max_size=40))
def test_stretches_say_where_the_mask_is_true(mask: list[bool]) -> None:
    own = [i for start, length in samples.runs_of_true(mask) for i in range(start, start + length)]
    assert own == [i for i, true in enumerate(mask) if true]


def test_long_samples_keep_beginning_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_TOKENS", 8)
    ids = list(range(100))
    long = {"input_ids": ids, "loss_mask": [i > 1 for i in ids], "logprobs": [-float(i) for i in ids]}
    tokens = samples.encode_tokens(long)
    assert tokens["ids"] == [0, 1, 2, 3, 4, 5, 98, 99] and tokens["cut"] == [6, 92]
    assert tokens["lp"] == [-2, -3, -4, -5, -98, -99] and tokens["own"] == [[2, 6]]
    text = "a" * 30_000 + "end"
    assert samples.cut_text(text).endswith("aend") and "10003 characters left out" in samples.cut_text(text)
    assert samples.cut_text("short") == "short"


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_are_decoded_by_the_runs_own_tokenizer(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    run = report_of(store, "a")[0]
    assert run["vocabulary"] == {2: "hello", 3: " world", 0: WORDS[0]} and run["problems"] == []


def test_without_a_tokenizer_tokens_are_numbers_and_the_report_says_so(store: Store) -> None:
    make_run(store, "a", [rows(0)], tokenizer=False)
    run = report_of(store, "a")[0]
    assert run["vocabulary"] == {} and len(run["samples"]) == 16
    assert len(run["problems"]) == 1 and "shown as numbers" in run["problems"][0]


def test_a_space_at_the_beginning_of_a_token_is_kept() -> None:
    words = {1: "one", 2: " two", 3: " "}

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).lstrip(" ")

    assert texts_of(decode, words.get, [3, 2, 1, 2]) == words


def test_a_part_of_a_character_is_shown_as_bytes(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"a": 0, "ð": 1, "Ł": 2, "ĺ": 3, "Ģ": 4}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ids = backend.encode("a😀").ids
    assert ids == [0, 1, 2, 3, 4]
    wanted = {0: "a", 1: "<0xF0>", 2: "<0x9F>", 3: "<0x98>", 4: "<0x80>"}
    assert texts_of(backend.decode, backend.id_to_token, ids) == wanted


# ── facts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_facts_of_an_unfinished_run(store: Store) -> None:
    run = make_run(store, "a", [rows(0)])
    append_log(store, "a", "tagged", {"tag": "best"})
    found = report_of(store, "a")[0]
    assert found["state"] == "Unfinished: 1 of 3 iterations are committed."
    facts = dict(found["facts"])
    assert facts["store"] == store.url and facts["SHA-256 of the head"] == run.digest_before(run.committed)
    assert found["starts"][1][0] == "1" and found["segments"][1][:2] == ["0", "3"]
    assert found["log"][1][1] == "tagged" and found["log"][1][3] == "tag best"
    assert found["recipe"]["trainer.lr"] == "0.0002"


def test_a_run_without_a_commit_says_so(store: Store) -> None:
    open_run(store, "empty", load_recipe("quickstart", []))
    found = report_of(store, "empty")[0]
    assert found["state"].startswith("Nothing is committed yet") and found["curves"] == {} and found["samples"] == []


def test_a_child_is_labelled(store: Store) -> None:
    make_run(store, "a", [rows(0), rows(1)])
    open_run(store, "b", load_recipe("quickstart", []), origin=Origin("a", 1))
    found = report_of(store, "b")[0]
    assert found["label"] == "a fork of 'a' at iteration 1"
    assert line(found, "reward")["x"] == [0]


def test_runs_side_by_side_show_where_their_recipes_differ(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    make_run(store, "b", [rows(0, reward=1.0)], "trainer.lr=1e-3", "algorithm.kl=loss", "algorithm.kl_coef=0.1")
    payload = make_report(store, ["a", "b"], 10, LARGE).payload
    names, *fields = payload["differences"]
    assert names == ["field", "a", "b"]
    assert {field[0] for field in fields} == {"trainer.lr", "algorithm.kl", "algorithm.kl_coef"}
    assert [line(run, "reward")["y"] for run in payload["runs"]] == [[0.5], [1]]


def test_fields_that_only_one_run_has_come_last() -> None:
    a, b = {"x.only_a": "1", "y": "2"}, {"y": "3"}
    rows = differences([{"name": "a", "recipe": a}, {"name": "b", "recipe": b}])
    assert rows == [["field", "a", "b"], ["y", "2", "3"], ["x.only_a", "1", "—"]]


def test_the_same_run_twice_is_a_mistake(store: Store) -> None:
    make_run(store, "a", [rows(0)])
    with pytest.raises(UserError, match="Each run once"):
        make_report(store, ["a", "a"], 10, LARGE)


def test_a_damaged_shard_takes_only_its_own_samples(store: Store, tmp_path: Path) -> None:
    make_run(store, "a", [rows(0), rows(1)], evaluate=False)
    shard = next((tmp_path / "store/a/iteration=000001/stage=verify").rglob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    run = report_of(store, "a")[0]
    assert {s["it"] for s in run["samples"]} == {0}
    assert len(run["problems"]) == 1 and shard.name in run["problems"][0] and "damaged" in run["problems"][0]


@pytest.mark.parametrize("table", ["scalars", "evaluate", "train_steps"])
@pytest.mark.parametrize("how", ["altered", "gone"])
def test_damage_to_what_the_curves_are_made_of_is_named(store: Store, tmp_path: Path, table: str, how: str) -> None:
    make_run(store, "a", [rows(0), rows(1)])
    shard = next((tmp_path / "store/a").rglob(f"{table}-00000.parquet"))
    data = bytearray(shard.read_bytes())
    data[40] ^= 1
    shard.unlink()
    if how == "altered":
        shard.write_bytes(data)
    with pytest.raises(UserError, match=rf"{shard} (is damaged|does not exist)"):
        report_of(store, "a")


def test_a_replay_that_ends_before_training_is_shown(store: Store) -> None:
    history = [rows(0, parsed="41", kept=False), rows(1)]
    make_run(store, "a", history, evaluate=False)
    make_run(store, "b", history, evaluate=False, trains=False)
    whole, short = report_of(store, "a", "b")
    for chart in ("reward", "accuracy", "length", "truncated", "dropped", "signal"):
        assert short["curves"][chart] == whole["curves"][chart]
    assert "loss" not in short["curves"] and len(short["samples"]) == 16
    for sample_of_short, sample_of_whole in zip(short["samples"], whole["samples"], strict=True):
        assert sample_of_short.items() <= sample_of_whole.items()


def test_a_run_on_s3_is_shown_alike(s3_store: Store, store: Store) -> None:
    for place in (s3_store, store):
        make_run(place, "report-alike", [rows(0), rows(1)])
    there, here = (report_of(place, "report-alike")[0] for place in (s3_store, store))
    assert there["samples"] == here["samples"] and there["vocabulary"] == here["vocabulary"] != {}
    assert there["curves"]["reward"] == here["curves"]["reward"]


# ── real runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Runs of all three flows, as the loop makes them."""
    folder = tmp_path_factory.mktemp("real")
    drive(folder, "tiny", tiny())
    drive(folder, "judged", tiny_evaluation("run://tiny"))
    drive(folder, "taught", tiny_sft())
    return driven(folder)


def test_a_real_run_has_all_its_curves(real: Store) -> None:
    run = report_of(real, "tiny")[0]
    wanted = {"reward", "accuracy", "length", "truncated", "loss", "kl", "entropy", "clip", "grad_norm", "lr", "gap"}
    assert wanted | {"outside", "signal", "throughput", "stages"} <= run["curves"].keys()
    assert line(run, "accuracy", "evaluation")["x"] == [0, 2, 3] and run["state"] == "Finished: 3 iterations."
    assert {"lp", "adv", "ver", "ref"} <= run["samples"][0]["tokens"].keys() and run["problems"] == []
    text = "".join(run["vocabulary"][i] for i in run["samples"][0]["tokens"]["ids"])
    assert text.startswith(run["samples"][0]["prompt"])
    assert {s["evaluated"] for s in run["samples"] if s["table"] == "evaluate"} == {0, 2, 3}


def test_older_tokenizers_are_read_by_transformers(real: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = report_of(real, "tiny")[0]["vocabulary"]
    monkeypatch.setattr(tokens, "_FAST", "absent.json")
    assert report_of(real, "tiny")[0]["vocabulary"] == usual != {}


def test_real_runs_of_the_other_flows(real: Store) -> None:
    judged, taught = report_of(real, "judged", "taught")
    assert judged["curves"].keys() == {"accuracy", "length", "truncated", "stages"} and judged["flow"] == "evaluate"
    assert len(judged["samples"]) == 8 and {s["table"] for s in judged["samples"]} == {"evaluate"}
    assert line(taught, "loss")["x"] == [0, 0.5, 1, 1.5, 2, 2.5] and "reward" not in taught["curves"]
    assert {s["table"] for s in taught["samples"]} == {"batch"} and taught["samples"][0]["sample_loss"] > 0


def test_a_run_of_schema_1_is_shown(tmp_path: Path) -> None:
    with tarfile.open(SCHEMA_1) as archive:
        archive.extractall(tmp_path, filter="data")
    store = open_store(tmp_path.as_uri())
    names = [summary.name for summary in list_runs(store)]
    runs = report_of(store, *names)
    assert runs and all(run["problems"] == [] for run in runs)
    assert any(run["samples"] and "reward" in run["curves"] for run in runs)


def test_columns_that_an_older_program_did_not_write_are_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = TABLES["scalars"]
    monkeypatch.setitem(TABLES, "scalars", schema.remove(schema.get_field_index("sample_logprob_gap")))
    make_run(store, "a", [rows(0, sample_kl=0.25)], evaluate=False)
    monkeypatch.undo()
    found = report_of(store, "a")[0]["samples"][0]
    assert found["sample_kl"] == 0.25 and "sample_logprob_gap" not in found
