"""Every question of docs/reference/cookbook.md, put to a real run; most answers are compared with plain Python."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow as pa
import pytest
from stage_driver import drive, store_in, tiny

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store import paths
from areal_tasks.store.commit import read_record
from areal_tasks.store.query import RunViews, Session
from areal_tasks.store.retention.compact import compact_all
from areal_tasks.store.runs import load_run
from areal_tasks.store.shards import read_table
from schemas.manifest import OwnerRecord

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cookbook.md"
VIEWS = PAGE.with_name("views.md")
QUESTION = re.compile(r"\*\*(?P<title>[^*]+)\*\*(?P<text>(?:(?!\*\*|```).)*)```sql\n(?P<query>.*?)```", re.DOTALL)
COOKBOOK = {found["title"]: found["query"] for found in QUESTION.finditer(PAGE.read_text())}
ITERATIONS, STOPPED = 5, 3

Row = dict[str, Any]
Tables = dict[str, list[Row]]


class Stopped(Exception):
    """The run's flow ends here."""


def stop_before_training(jobs: Sequence[Job]) -> list[Built]:
    if jobs[0].label == f"train {STOPPED}":
        raise Stopped
    return run_directly(jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the run `asked`: five iterations over eight prompts, interrupted once, with a fickle verifier."""
    folder = tmp_path_factory.mktemp("cookbook")
    recipe = tiny(
        data={"limit": 8},
        reward={"verifier": "sql_reward:fickle", "max_unverified": 0.9},
        schedule={"iterations": ITERATIONS},
    )
    with pytest.raises(Stopped):
        drive(folder, "asked", recipe, stop_before_training)
    drive(folder, "asked", recipe)
    return folder


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session(store_in(folder), "asked")


@pytest.fixture(scope="module")
def answers(session: Session) -> dict[str, pa.Table]:
    """What the run says to every question."""
    return {title: session.sql(query) for title, query in COOKBOOK.items()}


@pytest.fixture(scope="module")
def tables(folder: Path) -> Tables:
    """All rows of all tables with their iterations, and the stages, by commits and manifests alone."""
    run, found = load_run(store_in(folder), "asked"), defaultdict[str, list[Row]](list)
    seen = set[str]()
    for k in range(ITERATIONS):
        commit = run.commit(k)
        found["commits"].append(commit.model_dump())
        for ref in commit.stages:
            if ref.path in seen:
                continue
            seen.add(ref.path)
            manifest = run.read_stage(ref)
            owners = (manifest.provenance.owner, commit.provenance.owner)
            found["stages"].append(manifest.model_dump() | {"reused": owners[0] != owners[1], "path": ref.path})
            for name, table in manifest.tables.items():
                found[name] += [
                    row | {"iteration": manifest.iteration} for row in read_table(run.store, table).to_pylist()
                ]
    return dict(found)


@pytest.fixture(scope="module")
def samples(tables: Tables) -> list[Row]:
    """A row per sample, joined here; NaN rewards are None."""

    def key(row: Row) -> tuple[int, str]:
        return row["iteration"], row["sample_id"]

    others = [{key(row): row for row in tables[name]} for name in ("verify", "advantage", "train_samples")]
    rows = [row | {k: v for other in others for k, v in other.get(key(row), {}).items()} for row in tables["rollout"]]
    return [row | {"reward": None if math.isnan(row["reward"]) else row["reward"]} for row in rows]


def ask(answers: dict[str, pa.Table], title: str) -> list[Row]:
    rows: list[Row] = answers[title].to_pylist()
    return rows


def by(rows: Iterable[Row], *names: str) -> dict[Any, list[Row]]:
    found = defaultdict[Any, list[Row]](list)
    for row in rows:
        found[row[names[0]] if len(names) == 1 else tuple(row[n] for n in names)].append(row)
    return dict(sorted(found.items(), key=lambda item: repr(item[0])))


def mean(values: Iterable[Any]) -> float | None:
    known = [float(v) for v in values if v is not None]
    return fmean(known) if known else None


def close(value: Any, expected: Any, digits: int) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-5, abs_tol=0.6 * 10**-digits)


def groups_of(samples: list[Row]) -> list[Row]:
    """A row per group."""
    found = []
    for (k, group), rows in by(samples, "iteration", "group_id").items():
        rewards = [r["reward"] for r in rows if r["reward"] is not None]
        zero_variance = (min(rewards) == max(rewards)) if rewards else None
        known = {"prompt_id": rows[0]["prompt_id"], "epoch": rows[0]["epoch"], "reward": mean(rewards)}
        found.append({"iteration": k, "group_id": group, "zero_variance": zero_variance, **known})
    return found


# ── every question ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_names_every_view_and_no_column_that_is_not_there(session: Session) -> None:
    section = VIEWS.read_text().split("## Views")[1].split("\n## ")[0]
    table = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    named = {view: columns for views, _, columns in table for view in re.findall(r"`(\w+)`", views)}
    views = {str(row["name"]) for row in session.sql("SHOW TABLES").to_pylist()}
    one_per_table = section.split("| one per table |")[1].splitlines()[0]
    assert named.keys() <= views <= named.keys() | {*re.findall(r"`(\w+)`", one_per_table)}
    for view in ("log", "starts", "segments", "spool", "system", "commits", "stages", "shards"):
        there = {str(row["column_name"]) for row in session.sql(f"DESCRIBE {view}").to_pylist()}
        said = re.sub(r"\([^)]*\)", "", named[view])  # what stands in brackets explains
        assert set(re.findall(r"`(\w+)`", said)) <= there, view


def test_the_page_has_the_questions() -> None:
    assert len(COOKBOOK) >= 25
    assert len(COOKBOOK) == PAGE.read_text().count("```sql")


@pytest.mark.parametrize("title", COOKBOOK)
def test_every_question_has_an_answer(answers: dict[str, pa.Table], title: str) -> None:
    assert answers[title].num_columns > 1
    assert answers[title].num_rows or title == "When did the gradient jump?"


def test_answers_are_the_same_from_a_compaction_and_with_all_joins(
    folder: Path, answers: dict[str, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunViews, "unused", lambda self, words: set())
    compact_all(load_run(store_in(folder), "asked"))
    with Session(store_in(folder), "asked") as session:
        assert [region.compaction is None for region in session.runs[0].catalog.regions] == [False]
        for title, expected in answers.items():
            assert without_ties(session.sql(COOKBOOK[title])) == without_ties(expected), title


def without_ties(table: pa.Table) -> list[str]:
    """The rows as text, less the columns that name one of several equally frequent completions."""
    kept = [name for name in table.column_names if name not in ("usual_answer", "what")]
    return sorted(repr(row) for row in table.select(kept).to_pylist())


# ── what the answers mean ───────────────────────────────────────────────────────────────────────────────────────────


def test_learning(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "Does it learn?")
    assert row["samples"] == len(samples) and close(row["reward"], mean(r["reward"] for r in samples), 3)
    assert close(row["tokens"], mean(r["num_generated"] for r in samples), 2)


def test_held_out(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = ask(answers, "Does it generalise to held-out prompts?")
    expected = by(tables["evaluate"], "weights_version")
    assert [r["weights_version"] for r in rows] == sorted(expected)
    for row in rows:
        judged = expected[row["weights_version"]]
        assert row["samples"] == len(judged)
        assert close(row["accuracy"], mean(r["verdict"] == "correct" for r in judged), 3)


def test_zero_variance_groups(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "How many groups are zero-variance groups?")
    groups = groups_of(samples)
    assert (row["groups"], row["without_signal"]) == (len(groups), sum(g["zero_variance"] is True for g in groups))
    assert row["never_solved"] == sum(g["zero_variance"] is True and g["reward"] == 0 for g in groups)
    assert row["groups"] == 4 * ITERATIONS


def test_hardest_prompts(answers: dict[str, pa.Table], samples: list[Row], tables: Tables) -> None:
    rows = ask(answers, "Which prompts are hardest?")
    known = {prompt: mean(g["reward"] for g in found) for prompt, found in by(groups_of(samples), "prompt_id").items()}
    expected = sorted(reward for reward in known.values() if reward is not None)
    assert all(close(row["reward"], value, 3) for row, value in zip(rows, expected, strict=True))
    texts = {row["prompt"]: row["prompt_id"] for row in tables["prompts"]}
    assert all(close(row["reward"], known[texts[row["prompt"]]], 3) for row in rows)


def test_never_solved(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "Which prompts were never solved in the last 50 iterations, and what is their usual answer?")
    expected = by(samples, "prompt")
    for row in rows:
        there = expected[row["prompt"]]
        assert row["samples"] == len(there) >= 8 and close(row["reward"], mean(r["reward"] for r in there), 2)
        counts = Counter(r["completion"] for r in there)
        assert counts[row["usual_answer"]] == max(counts.values())


def test_epochs_of_a_prompt(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "What did each epoch bring, prompt by prompt?")
    groups = by([g for g in groups_of(samples) if g["reward"] is not None], "prompt_id")
    assert {row["prompt_id"] for row in rows} == {p for p, found in groups.items() if len(found) > 1}
    for row in rows:
        found = sorted(groups[row["prompt_id"]], key=lambda g: g["epoch"])
        assert close(row["gained"], found[-1]["reward"] - found[0]["reward"], 3)
        assert (row["first_epoch"], row["last_epoch"]) == (found[0]["epoch"], found[-1]["epoch"])


def test_coverage(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "How far has each epoch come through the prompts, and is any prompt drawn twice?")
    expected = by(groups_of(samples), "epoch")
    assert [(r["epoch"], r["groups"], r["prompts"]) for r in rows] == [(e, len(g), len(g)) for e, g in expected.items()]
    assert [r["repeated"] for r in rows] == [0] * len(rows) and rows[0]["coverage"] == 1


def test_reward_by_length(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "How does reward depend on length?")
    assert row["samples"] == len(samples) and close(row["truncated"], mean(r["truncated"] for r in samples), 3)


def test_truncation(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "How often is a completion cut off, over time?")
    assert close(row["truncated"], mean(r["stop_reason"] == "length" for r in samples), 4)
    assert row["longest"] == max(r["num_generated"] for r in samples)
    assert row["median_tokens"] == median(r["num_generated"] for r in samples)


def test_length_hacking(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "Does it earn by writing more (or less)?")
    xs, ys = [], []
    for rows in by([r for r in samples if r["reward"] is not None], "iteration", "group_id").values():
        lengths, rewards = [r["num_generated"] for r in rows], [r["reward"] for r in rows]
        xs += [x - fmean(lengths) for x in lengths]
        ys += [y - fmean(rewards) for y in rewards]
    covariance, spread = (
        sum(x * y for x, y in zip(xs, ys, strict=True)),
        sum(x * x for x in xs) * sum(y * y for y in ys),
    )
    assert close(row["correlation"], covariance / math.sqrt(spread), 3)


def test_repetition(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "Does it repeat itself?")
    counts = Counter((r["iteration"], r["group_id"], r["completion"]) for r in samples)
    assert close(row["repeated"], (len(samples) - len(counts)) / len(samples), 3)
    assert row["most_often"] == max(counts.values())


def test_verdicts_over_time(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "What do the verdicts say over time?")
    counts = Counter(r["verdict"] for r in samples)
    assert close(row["correct"], counts["correct"] / len(samples), 3)
    assert close(row["not_judged"], (counts["timeout"] + counts["error"]) / len(samples), 4)
    assert counts["error"] and counts["unparseable"]


def test_not_judged(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "Which completions could not be judged, and why?")
    failed = {(r["iteration"], r["sample_id"]) for r in samples if r["verdict"] in ("timeout", "error")}
    assert {(r["iteration"], r["sample_id"]) for r in rows} <= failed and len(rows) == min(20, len(failed))
    assert all("doubled digit" in r["detail"] for r in rows)


def test_contradictions(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "Does the verifier contradict itself?")
    expected = {}
    for (prompt, completion), found in by(samples, "prompt", "completion").items():
        rewards = {r["reward"] for r in found if r["reward"] is not None}
        if len({r["verdict"] for r in found}) > 1 or len(rewards) > 1:
            expected[prompt, completion] = len(found)
    assert expected and all(expected[r["prompt"], r["completion"]] == r["times"] for r in rows)
    assert len(rows) == min(20, len(expected))


def test_dropped(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = {row["what"]: row for row in ask(answers, "What do dropped samples change?")}
    expected = by([r | {"what": "kept" if r["kept"] else r["dropped_reason"]} for r in samples], "what")
    assert rows.keys() == expected.keys() and "error" in rows
    for what, row in rows.items():
        assert (row["samples"], row["tokens"]) == (len(expected[what]), sum(r["num_generated"] for r in expected[what]))
        assert close(row["reward"], mean(r["reward"] for r in expected[what]), 3)


def test_optimizer(answers: dict[str, pa.Table], tables: Tables) -> None:
    [row] = ask(answers, "Is the optimizer healthy?")
    assert close(row["grad_norm"], max(s["grad_norm"] for s in tables["train_steps"]), 2)
    assert close(row["entropy"], mean(s["entropy"] for s in tables["train_steps"]), 3) and row["skipped"] == 0


def test_drift(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = ask(answers, "Does the policy drift from where it began?")
    kl = [mean(s["kl"] for s in found) or 0.0 for found in by(tables["train_steps"], "iteration").values()]
    assert all(close(row["kl"], value, 6) for row, value in zip(rows, kl, strict=True)) and max(kl) > 0
    assert rows[0]["change"] is None and close(rows[2]["change"], kl[2] - kl[1], 6)


def test_entropy(answers: dict[str, pa.Table], tables: Tables, samples: list[Row]) -> None:
    rows = ask(answers, "Does the entropy collapse?")
    for row in rows:
        steps = [s["entropy"] for s in tables["train_steps"] if s["iteration"] == row["iteration"]]
        said = [s["completion"] for s in samples if s["iteration"] == row["iteration"]]
        assert close(row["entropy"], fmean(steps), 4)
        assert close(row["distinct_completions"], len(set(said)) / len(said), 3)
    assert rows[0]["of_first"] == 1 and len(rows) == ITERATIONS


def test_gradient_spikes(session: Session, tables: Tables) -> None:
    query = COOKBOOK["When did the gradient jump?"].replace("> 3 * usual", "> 1.01 * usual").replace("LIMIT 20", "")
    norms = [s["grad_norm"] for s in sorted(tables["train_steps"], key=lambda s: s["step"])]
    expected = {i + 1 for i in range(1, len(norms)) if norms[i] > 1.01 * round(median(norms[max(0, i - 20) : i]), 3)}
    assert {row["step"] for row in session.sql(query).to_pylist()} == expected and expected


def test_extreme_ratios(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "Which samples have extreme importance ratios?")
    distances = sorted(
        (abs(math.log(r["sample_ratio"])) for r in samples if r.get("sample_ratio", 0) > 0), reverse=True
    )
    assert (
        all(close(row["distance"], value, 3) for row, value in zip(rows, distances, strict=False)) and len(rows) == 10
    )
    assert all(row["lag"] == 0 for row in rows)


def test_minibatches(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    rows = ask(answers, "Are later minibatches off policy?")
    expected = by([r for r in samples if r.get("minibatch", -1) >= 0], "minibatch")
    assert [(r["minibatch"], r["samples"]) for r in rows] == [(m, len(found)) for m, found in expected.items()]
    assert all(close(r["ratio"], mean(s["sample_ratio"] for s in expected[r["minibatch"]]), 4) for r in rows)


def test_agreement(answers: dict[str, pa.Table], tables: Tables) -> None:
    [row] = ask(answers, "Do servers and trainer compute the same log-probabilities?")
    known = [s for s in tables["train_steps"] if not math.isnan(s["logprob_gap_mean"])]
    assert close(row["mean_e6"], 1e6 * fmean(s["logprob_gap_mean"] for s in known), 3)
    assert row["max_e6"] < 100 and row["ratio_outside"] == 0


def token_rows(tables: Tables) -> list[Row]:
    advantages = {(r["iteration"], r["sample_id"]): r["advantages"] for r in tables["advantage"]}
    return [
        {"iteration": r["iteration"], "sample_id": r["sample_id"], "position": i, "logprob": r["logprobs"][i]}
        | {"token_id": r["input_ids"][i], "advantage": advantages[r["iteration"], r["sample_id"]][i]}
        for r in tables["rollout"]
        for i in range(r["num_tokens"])
        if r["loss_mask"][i]
    ]


def test_good_and_bad_tokens(answers: dict[str, pa.Table], tables: Tables) -> None:
    [row] = ask(answers, "Does training separate good tokens from bad ones?")
    tokens = token_rows(tables)
    assert row["tokens"] == len(tokens)
    assert close(row["logprob_of_good"], mean(t["logprob"] for t in tokens if t["advantage"] > 0), 3)
    assert close(row["logprob_of_bad"], mean(t["logprob"] for t in tokens if t["advantage"] < 0), 3)


def test_luckiest_tokens(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = ask(answers, "Which were the luckiest tokens?")
    expected = sorted((t for t in token_rows(tables) if t["advantage"] > 0), key=lambda t: t["logprob"])
    assert [r["token_id"] for r in rows[:3]] == [t["token_id"] for t in expected[:3]]
    assert all(close(r["logprob"], t["logprob"], 3) for r, t in zip(rows, expected, strict=False))


def test_unsure_places(answers: dict[str, pa.Table], tables: Tables) -> None:
    [row] = ask(answers, "Where in a completion is the policy unsure?")
    tokens = token_rows(tables)
    assert row["from_token"] == 0 and row["tokens"] == len(tokens)
    assert close(row["logprob"], fmean(t["logprob"] for t in tokens), 3)


def test_staleness(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "How stale is what it trains on?")
    assert (row["lag"], row["samples"], row["share"], row["interrupted"]) == (0, len(samples), 1, 0)
    [row] = ask(answers, "How old are the tokens, and how many were sampled over the KV cache of older weights?")
    assert row == {"lag": 0, "tokens": sum(s["num_generated"] for s in samples), "share": 1, "stale_kv": 0}


def test_servers(answers: dict[str, pa.Table], samples: list[Row], tables: Tables) -> None:
    rows = ask(answers, "How much does each server deliver?")
    assert sum(r["tokens"] for r in rows) == sum(r["num_generated"] for r in samples)
    assert sum(r["iterations"] for r in rows) == ITERATIONS and all(r["tokens_per_second"] > 0 for r in rows)


def test_stage_times_and_bytes(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = {row["stage"]: row for row in ask(answers, "Where do the time and the bytes go?")}
    for stage, row in rows.items():
        found = [s for s in tables["stages"] if s["stage"] == stage]
        sizes = [shard["bytes"] for s in found for t in s["tables"].values() for shard in t["shards"]]
        assert row["commits"] == len(found) and close(row["megabytes"], sum(sizes) / 1e6, 1)


def test_accepted_tokens(answers: dict[str, pa.Table], samples: list[Row]) -> None:
    [row] = ask(answers, "What does an accepted token cost?")
    assert row["generated"] == sum(r["num_generated"] for r in samples)
    assert row["kept"] == sum(r["num_generated"] for r in samples if r["kept"]) < row["generated"]
    assert row["seconds_per_1000"] > 0


def test_cost(answers: dict[str, pa.Table], folder: Path, tables: Tables) -> None:
    [row] = ask(answers, "What did the run cost?")
    evaluated = sum(r["num_generated"] for r in tables["evaluate"])
    assert row["generated"] == sum(r["num_generated"] for r in tables["rollout"]) + evaluated
    assert row["trained"] == sum(r["tokens"] for r in tables["train_steps"])
    made = [(r["provenance"]["owner"], r["provenance"]["committed"]) for r in tables["stages"] + tables["commits"]]
    store, wall = store_in(folder), 0.0
    for n in (1, 2):  # no log tells how the first, which was stopped, and the second ended
        began = read_record(store, paths.owner("asked", n), OwnerRecord).started
        ended = max(committed for owner, committed in made if owner == n)
        wall += (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    assert close(row["wall_seconds"], wall, 1) and row["gpu_seconds"] == 0


def test_bytes_per_token(answers: dict[str, pa.Table], tables: Tables) -> None:
    tokens = sum(r["num_tokens"] for r in tables["rollout"])
    for row in ask(answers, "How many bytes does a token take in the store?"):
        assert close(row["bytes_per_token"], row["bytes"] / tokens, 2)


def test_weights(answers: dict[str, pa.Table], tables: Tables) -> None:
    [row] = ask(answers, "How long do new weights take to arrive?")
    assert row["versions"] == len(tables["publish"]) == ITERATIONS
    assert close(row["slowest_server"], mean(max(p["load_seconds"]) for p in tables["publish"]), 3)


def test_reuse(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = {row["stage"]: row for row in ask(answers, "What was built, and what was found committed?")}
    reused = Counter(s["stage"] for s in tables["stages"] if s["reused"])
    assert reused["rollout"] == 1 and {name: row["reused"] for name, row in rows.items() if row["reused"]} == reused


def test_crash(answers: dict[str, pa.Table]) -> None:
    rows = ask(answers, "What happened at a crash?")
    assert [(r["iteration"], r["owner"]) for r in rows] == [(STOPPED, 1), (STOPPED, 2)]
    assert "rollout" in rows[0]["which"] and "train" in rows[1]["which"]


def test_files(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = ask(answers, "Which files hold an iteration?")
    last = [s for s in tables["stages"] if s["iteration"] == ITERATIONS - 1]
    assert {r["path"] for r in rows} == {f["path"] for s in last for t in s["tables"].values() for f in t["shards"]}


def test_iterations(answers: dict[str, pa.Table], tables: Tables) -> None:
    rows = ask(answers, "How long does an iteration take, and how much of it is in no stage?")
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert all(row["seconds"] > 0 and row["in_stages"] > 0 for row in rows)
    assert rows[0]["since_last_commit"] is None and rows[1]["since_last_commit"] > 0
