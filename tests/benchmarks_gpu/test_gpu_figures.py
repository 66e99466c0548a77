"""The parts of the GPU measurements that need no GPU: shapes, the split of an iteration, the table of figures."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LIMIT, alive, wait_until

from benchmarks import trainer_core
from benchmarks.asynchrony_learning import Learned
from benchmarks.gpu import fixed_load, simulate_fixed_load
from benchmarks.gpu.baseline_step import fitted, full_logits_loss, make_step, micro_seconds, targets
from benchmarks.gpu.learn_asynchrony import accuracy_at, interval, print_comparison
from benchmarks.gpu.mcnemar import compare, exact_p
from benchmarks.gpu.packed_model import VARLEN, packed_inputs, random_policy
from benchmarks.gpu.report import Figure, Results, bare_seconds, figures, markdown
from benchmarks.gpu.results import load, record, run_limited
from benchmarks.gpu.run_times import Cadence, at_cadence, beside_raw, join, split, steady_rows, summary, without_end
from benchmarks.gpu.servers import Answer, Load
from benchmarks.gpu.settings import OF_SHAPE, concurrency_of, recipe_of_shape, samples_of
from benchmarks.gpu.sglang_load import cache_of
from benchmarks.gpu.shapes import SHAPES, learn_tokenizer, make_shape, mfu
from benchmarks.simulate import Layout
from schemas.recipe.load import list_recipes, load_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MACHINE = {"device": "a chip", "date": "2026-01-01 10:00 UTC", "versions": {"torch": "2"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer(SHAPES["tiny"].words)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_the_model_has_them(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config())
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters


def test_the_known_rate_gives_the_known_share_of_the_chip() -> None:
    assert mfu(SHAPES["1.5b"], 47_500, 1024) == pytest.approx(0.46, abs=0.005)


def test_a_shape_folder_decodes_every_id(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = make_shape("tiny", tmp_path / "tiny", tokenizer)
    found = AutoTokenizer.from_pretrained(folder)
    assert len(found) == SHAPES["tiny"].vocabulary
    assert all(found.decode([i]) for i in range(3, len(found)))
    assert found.decode(found("x = 41 + 1")["input_ids"]) == "x = 41 + 1"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == SHAPES["tiny"].parameters


def test_packing_changes_neither_loss_nor_gradient() -> None:
    ids = torch.randint(3, 500, (4, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for attention, packed in (("sdpa", False), (VARLEN, True)):
        model = random_policy(SHAPES["tiny"], "cpu", attention, torch.float32)
        inputs = packed_inputs(ids) if packed else {"input_ids": ids}
        loss = full_logits_loss(model(**inputs).logits.flatten(0, 1), targets(ids))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("master", [False, True])
def test_micro_batches_add_up_to_the_gradient_of_the_whole(master: bool) -> None:
    ids = torch.randint(3, 500, (4, 16), generator=torch.Generator().manual_seed(2))
    gradients = []
    for micro in (4, 1):
        step = make_step("tiny", "eager", "cpu", master)
        for part in ids.split(micro):
            step.accumulate(part, micro / 4)
        gradients.append(torch.cat([p.grad.float().flatten() for p in step.weights]))
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[0].norm()  # bf16 passes


def test_a_step_with_masters_writes_them_back() -> None:
    step = make_step("tiny", "eager", "cpu", master=True)
    assert step.master is not None
    before = [m.clone() for m in step.master]
    step(torch.randint(3, 500, (4, 16)), 2)
    assert all(not torch.equal(m, b) for m, b in zip(step.master, before, strict=True))
    assert all(torch.equal(w, m.bfloat16()) for w, m in zip(step.weights, step.master, strict=True))


def test_micro_batches_divide_the_rows_and_hold_as_many_tokens() -> None:
    assert fitted(8, 128, 1024) == 8
    assert fitted(8, 256, 576) == 16
    assert fitted(64, 6, 1024) == 6


def test_a_further_micro_batch_is_not_begun_when_the_time_is_over() -> None:
    step, ids = make_step("tiny", "eager", "cpu", False), torch.randint(3, 500, (4, 16))
    assert set(micro_seconds(step, ids, (4, 2), "cpu", 60.0)) == {4, 2}
    assert set(micro_seconds(step, ids, (4, 2), "cpu", 0.0)) == {4}
    assert all(p.grad is None for p in step.weights)


def test_a_cut_off_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    record(file, "step", shape="tiny", tokens_per_second=1.0)
    with file.open("a") as sink:
        sink.write('{"what": "ste')
    assert [row["what"] for row in load(file)] == ["step"]


def test_what_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 3600 & echo $! > {pid}; wait"
    wait_until(lambda: run_limited(["bash", "-c", script], 0.3) == 124 and pid.exists() and pid.read_text())
    wait_until(lambda: not alive(int(pid.read_text())), "the end of what it started")
    assert run_limited(["true"], LIMIT) == 0


def test_the_trainers_steps_are_measured_without_a_pipeline() -> None:
    parser = argparse.ArgumentParser()
    trainer_core.add_options(parser)
    words = ["--rows", "6", "--length", "24", "--steps", "2", "--varied", "--eager", "--micro-batch-tokens", "64"]
    found = trainer_core.measure("tiny", "local", parser.parse_args(words))
    assert len(found.step_seconds) == 2 and found.tokens_per_second > 0
    assert 12 * 24 / 8 <= found.tokens <= 12 * 24


# ── where an iteration's time goes ──────────────────────────────────────────────────────────────────────────────────


def tables(iterations: int = 4) -> dict[str, list[dict[str, Any]]]:
    """An iteration every 10 s: 6 s generation, 3 s training, 0.4 s weights; the last writes a checkpoint for 1 s."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("commits", "stages", "rollout", "train", "publish")}
    for k in range(iterations):
        end, kept = 10.0 * (k + 1), k == iterations - 1
        closing = 1.0 if kept else 0.1
        found["commits"].append(
            {"iteration": k, "started": end - 10, "committed": end, "checkpoint_version": k + 1 if kept else None}
            | {"owner": 1}
        )
        for name, seconds in (("rollout", 6.2), ("train", 3.1), ("publish", 0.4)):
            stage = {"iteration": k, "stage": name, "seconds": seconds, "bytes": 10, "committed": end - closing}
            found["stages"].append(stage | {"started": end - closing - seconds - (0.5 if name == "train" else 0)})
        found["rollout"].append(
            {"iteration": k, "samples": 4, "generated": 400, "tokens": 480, "generation": 6.0, "mean_tokens": 120.0}
            | {"full_length": 4}
        )
        found["train"].append({"iteration": k, "trained": 476, "steps": 3.0, "gap_mean": 0.01, "gap_max": 0.1})
        found["publish"].append({"iteration": k, "transport": "tensor", "write_seconds": 0.2, "load_seconds": 0.1})
    return found


def test_an_iteration_is_split_without_counting_anything_twice() -> None:
    rows = join(tables())
    assert [row["wall"] for row in rows] == [10.0] * 4
    assert rows[1]["overhead"] == pytest.approx(1.0)
    assert rows[1]["tables_and_orchestration"] == pytest.approx(0.6)
    assert rows[1]["weights_ready"] == pytest.approx(3.1 + 0.5 - 3.0)
    assert rows[3]["checkpoint"] and rows[3]["tables_and_orchestration"] == pytest.approx(1.0 - 0.4 - 1.0)


def test_overhead_is_what_neither_generates_nor_trains() -> None:
    row = {"wall": 5.0, "generation": 3.0, "steps": 1.5, "stage_publish": 0.2, "closing": 0.1, "checkpoint": False}
    row["stage_rollout"] = 3.1
    assert split(row) == pytest.approx({"generation": 3.0, "overhead": 0.5, "tables_and_orchestration": 0.3})
    row["generation"] = 4.0  # it began while the iteration before wrote its weights
    assert split(row)["overhead"] == pytest.approx(0.4)


def raw_rows(iterations: int = 4) -> list[dict[str, Any]]:
    """Raw rounds of 2 s each, in 2.5 s."""
    return [{"iteration": k, "raw_tokens": 160.0, "raw_seconds": 2.0, "raw_spent": 2.5} for k in range(iterations)]


def test_a_raw_round_within_a_rollout_is_no_time_of_the_runs() -> None:
    longer = tables()
    for commit in longer["commits"]:
        commit |= {"started": commit["started"] + 2.5 * commit["iteration"], "committed": commit["committed"] + 2.5}
    for before, after in pairwise(longer["commits"]):
        after["committed"] = before["committed"] + 12.5
    for stage in longer["stages"]:
        stage["committed"] += 2.5 * (stage["iteration"] + 1)
        stage["started"] += 2.5 * (stage["iteration"] + 1)
        stage["seconds"] += 2.5 if stage["stage"] == "rollout" else 0.0
    names = ("wall", "stage_rollout", "overhead", "tables_and_orchestration")
    for among, alone in zip(join(longer, raw_rows()), join(tables()), strict=True):
        assert [among[name] for name in names] == pytest.approx([alone[name] for name in names])


def test_raw_rounds_are_compared_with_the_rollout_they_belong_to() -> None:
    rows = join(tables(), raw_rows())
    for row, seconds in zip(rows, (9.9, 4.0, 5.0, 8.0), strict=True):
        row["stage_rollout"] = seconds
    found = beside_raw(rows, 1)
    assert found["tokens_per_second"] == 80.0 and found["requests"] == 4 and len(found["rounds"]) == 3
    assert found["ratios"] == [400 / 4 / 80, 400 / 5 / 80, 400 / 8 / 80]
    assert found["standard_error"] == pytest.approx(0.3146 / 3**0.5, abs=1e-3)
    assert beside_raw(join(tables()), 1) == beside_raw(rows, 3) == {}


def test_a_summary_leaves_the_first_iterations_out() -> None:
    rows = join(tables())
    rows[0] |= {"wall": 100.0, "generation": 90.0}
    found = summary(rows, 1, Cadence(1, 9.0))
    assert found["iterations"] == 3 and found["wall_seconds"] == pytest.approx(10.0)
    assert found["rollout_tokens_per_second"] == pytest.approx(400 / 6.2)
    assert found["overhead_share"] == pytest.approx(0.1)  # a checkpoint in three iterations, as it was
    assert found["full_length_share"] == 1.0 and found["checkpoints"] == 1
    assert found["weights_ready_seconds"] == pytest.approx(0.6) and found["weights_ready_written_seconds"] is None


def test_weights_and_checkpoints_count_as_often_as_the_recipe_writes_them() -> None:
    """Each iteration takes 10 s: 9 s of generation and training; 0.9 s the checkpoint, 0.6 s weights."""
    rows = join(tables(6))[2:]
    for row in rows:
        row["materialised"] = row["iteration"] % 2 == 0
        row["stage_publish"] += 0.6 * row["materialised"]
    found = at_cadence(Cadence(10, 300.0), rows)
    assert found["write_cost_seconds"] == pytest.approx(0.6)
    assert found["checkpoint_cost_seconds"] == pytest.approx(0.9)
    rest = 1.0 - 0.6 / 2 - 0.9 / 4
    assert found["overhead_seconds"] == pytest.approx(rest + 0.6 / 10 + 0.9 * 3 / 300)
    always = [row | {"materialised": True, "checkpoint": False} for row in rows]
    found = at_cadence(Cadence(10, 300.0), always)
    assert found["overhead_seconds"] == pytest.approx(1.0) and found["write_cost_seconds"] is None
    assert found["not_seen"] == ["a checkpoint"] and found["checkpoint_cost_seconds"] is None


def test_a_cost_is_never_below_zero() -> None:
    rows = join(tables(6))[2:]
    rows[-1]["closing"] = 0.0
    found = at_cadence(Cadence(10, 300.0), rows)
    assert found["checkpoint_cost_seconds"] == 0.0 and found["overhead_seconds"] == pytest.approx(1.0)
    assert found["not_seen"] == ["a write of weights"]


def test_a_slow_rollout_after_a_checkpoint_counts_as_often_as_there_are_checkpoints() -> None:
    """6.2 s of rollout each, but 8.2 s after the one checkpoint: a checkpoint in 100 iterations makes that 0.02 s."""
    given = tables(6)
    given["commits"][3]["checkpoint_version"] = 4
    rows = join(given)
    assert [row["after_checkpoint"] for row in rows] == [False] * 4 + [True, False]
    rows[4]["stage_rollout"] += 2.0
    rows[4]["generation"] += 2.0
    found = at_cadence(Cadence(10, 300.0), rows)
    assert found["rollout_after_checkpoint_cost_seconds"] == pytest.approx(2.0)
    assert found["rollout_stage_seconds"] == pytest.approx(6.2 + 2.0 * 3 / 300)
    assert found["generation_seconds"] == pytest.approx(6.0 + 2.0 * 3 / 300)


def test_what_a_restart_took_is_no_iterations_time() -> None:
    """A new owner goes on 600 s later: its first iterations warm up again, and the first holds another's stages."""
    given = tables(6)
    for table, times in (("commits", ("started", "committed")), ("stages", ("started", "committed"))):
        for row in given[table]:
            for name in times if row["iteration"] >= 3 else ():
                row[name] += 600.0
    for row in given["commits"][3:]:
        row["owner"] = 2
    rows = join(given)
    assert [row["wall"] for row in rows] == pytest.approx([10.0] * 6)
    assert [row["age"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["iteration"] for row in steady_rows(rows, 1)] == [1, 2, 4, 5]
    assert [row["iteration"] for row in steady_rows(rows, 0)] == [0, 1, 2, 4, 5]


def test_the_end_of_a_run_that_waits_for_its_checkpoint_is_no_iterations_time() -> None:
    rows = join(tables(5))
    assert [row["iteration"] for row in without_end(rows)] == [0, 1, 2, 3]
    assert without_end(rows[:4]) == rows[:4] and without_end(rows[4:]) == rows[4:]


def test_too_short_a_run_is_said_to_be_so() -> None:
    with pytest.raises(SystemExit, match="more than 4 after a start are needed"):
        summary(join(tables()), 4, Cadence(1, 9.0))


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def row(what: str, shape: str = "1.5b", **values: Any) -> dict[str, Any]:
    return {"what": what, "shape": shape, **MACHINE, **values}


def our_run(**changes: Any) -> dict[str, Any]:
    found = summary(join(tables()), 1, Cadence(1, 9.0))
    named = {"run": "r", "flow_run": "f", "groups": 2, "group_size": 2, "new_tokens": 100}
    how = {"minibatches": 1, "kl": "none", "store": "file:///dev/shm/store"}
    return row("our_iteration", **(found | named | how | changes))


def by_name(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    return {f.what: f for f in figures(rows)}


BATCH = {"rows": 128, "length": 1024}


def test_figures_take_our_newest_and_the_best_baseline() -> None:
    found = by_name(
        [
            row("trainer_core", tokens_per_second=70.0, backend="local", varied=False, **BATCH),
            row("trainer_core", tokens_per_second=60.0, backend="local", varied=False, **BATCH),
            row("plain_step", tokens_per_second=40.0, variant="eager", **BATCH),
            row("plain_step", tokens_per_second=50.0, variant="layers", **BATCH),
            row("plain_step", tokens_per_second=70.0, variant="layers", rows=128, length=512),
        ]
    )
    assert found["trainer ÷ plain compiled step"].value == 1.2
    assert found["trainer MFU"].reached is False


def test_only_steps_of_one_batch_on_one_device_are_compared() -> None:
    long = {"rows": 32, "length": 4096}
    found = by_name(
        [
            row("trainer_core", tokens_per_second=60.0, backend="local", varied=False, **long),
            row("plain_step", tokens_per_second=50.0, variant="layers", **BATCH),
            row("plain_step", tokens_per_second=50.0, variant="layers", rows=128, length=4096),
            row("plain_step", tokens_per_second=50.0, variant="layers", device="another chip", **long),
            row("trainer_core", tokens_per_second=60.0, backend="local", varied=True, **BATCH),
        ]
    )
    assert list(found) == ["trainer MFU, 32 × 4096"]
    assert found["trainer MFU, 32 × 4096"].value == pytest.approx(mfu(SHAPES["1.5b"], 60.0, 4096), abs=1e-4)


WAYS = (("tensor", "memory"), ("store", "memory"), ("store", "S3"))


def test_an_iteration_is_compared_with_the_bare_parts_for_its_tokens() -> None:
    since = {"since": "last optimizer step", "answered_seconds": 0.5, "answered": [0.5]}
    ours = our_run(cache_tokens=1000, retractions=0)
    rows = [
        ours,
        row("raw_sglang", tokens_per_second=80.0, new_tokens=100, requests=4, cache_tokens=900, retractions=2),
        row("raw_sglang", tokens_per_second=800.0, new_tokens=100, requests=64),
        row("plain_step", tokens_per_second=120.0, variant="layers", length=120, rows=4),
        row("plain_step", tokens_per_second=100.0, variant="layers+master", length=120, rows=4),
        *(row("weights", transport=t, through=on, **since) for t, on in WAYS),
    ]
    assert bare_seconds(Results(rows), ours) == pytest.approx((5.0, 4.0, "layers"))
    pairs = {"ratios": [0.9, 1.1], "standard_error": 0.1}
    turns = row("raw_sglang", run="r", alternating=True, tokens_per_second=50.0, requests=4, **pairs)
    assert bare_seconds(Results([*rows, turns, turns | {"run": "another"}]), ours) == pytest.approx(
        (8.0, 4.0, "layers")
    )
    in_turns = by_name([*rows, turns])["rollout stage ÷ raw SGLang"]
    assert (in_turns.value, in_turns.reached, in_turns.target) == (1.0, None, "≥ 0.97, undecided")
    for error, ratios, reached in ((0.02, [0.9, 1.1], True), (0.02, [0.9, 0.96], False)):
        said = turns | {"ratios": ratios, "standard_error": error}
        assert by_name([*rows, said])["rollout stage ÷ raw SGLang"].reached is reached
    found = by_name(rows)
    assert found["iteration ÷ bare parts"].value == pytest.approx(10 / 9, abs=1e-4)
    assert found["iteration ÷ bare parts"].reached is False
    assert "1 minibatch, no KL, store on memory" in found["iteration ÷ bare parts"].ours
    raw = found["rollout stage ÷ raw SGLang"]
    assert raw.value == pytest.approx(400 / 6.2 / 80, abs=1e-4)
    assert "cache of 1,000 tokens" in raw.ours and "cache of 900 tokens, full 2 times" in raw.baseline
    assert found["new weights answer, tensor, s"].reached is False
    assert (
        found["new weights held, tensor, s"].value == 0.6
        and "with Prefect" in found["new weights held, tensor, s"].ours
    )
    assert found["new weights answer, store through memory, s"].reached
    assert found["new weights answer, store through S3, s"].target == "≤ 3"
    assert "**missed**" in markdown(list(found.values()), rows) and "(flow run f)" in markdown([], rows)


@pytest.mark.parametrize("other", [{"length": 128, "rows": 4}, {"length": 120, "rows": 128}, {"device": "another"}])
def test_no_other_plain_step_stands_for_an_iterations(other: dict[str, Any]) -> None:
    rows = [
        our_run(),
        row("raw_sglang", tokens_per_second=80.0, new_tokens=100, requests=4),
        row("plain_step", tokens_per_second=120.0, variant="layers", **({"length": 120, "rows": 4} | other)),
    ]
    assert "iteration ÷ bare parts" not in by_name(rows)


def test_a_share_that_lacks_a_cost_says_so_and_reaches_nothing() -> None:
    name = "all but generation and training ÷ iteration"
    assert by_name([our_run(not_seen=[], overhead_share=0.01)])[name].reached is True
    found = by_name([our_run(not_seen=["a checkpoint"], overhead_share=0.01)])
    assert found[f"{name}, **without a checkpoint**"].reached is None and name not in found


def test_each_device_has_a_table_of_its_own() -> None:
    ours = {"tokens_per_second": 60.0, "backend": "local", "varied": False, **BATCH}
    rows = [row("trainer_core", **ours), row("trainer_core", device="another chip", **ours)]
    text = markdown(figures(rows), rows)
    assert text.count("trainer MFU") == 2 and "\na chip ·" in f"\n{text}" and "\nanother chip ·" in text


def test_results_that_do_not_say_their_batch_are_left_out_and_counted() -> None:
    old = [row("trainer_core", tokens_per_second=60.0, backend="local", varied=False)]
    assert figures(old) == [] and "comparable with: 1 results" in markdown([], old)


def test_what_was_not_measured_is_left_out() -> None:
    assert figures([row("plain_step", tokens_per_second=1.0, variant="eager", **BATCH)]) == []


def test_a_servers_log_says_how_large_its_cache_is_and_whether_it_was_full(tmp_path: Path) -> None:
    log = tmp_path / "inference-0-1-0.log"
    log.write_text("max_total_num_tokens=1234, chunked\nKV cache pool is full. Retract requests. #retracted\n")
    assert cache_of(log) == {"cache_tokens": 1234, "retractions": 1}
    assert cache_of(tmp_path / "none.log") == {"cache_tokens": None, "retractions": None}


# ── the test of two evaluations ─────────────────────────────────────────────────────────────────────────────────────


def test_mcnemar_counts_only_questions_that_both_answered() -> None:
    first = {1: True, 2: False, 3: False, 4: True}
    second = {1: True, 2: True, 3: False, 5: True}
    found = compare(first, second)
    assert (found.questions, found.first, found.second, found.gained, found.lost) == (3, 1, 2, 1, 0)
    assert found.p == 1.0


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (10, 0, 2 / 1024), (5, 5, 1.0), (9, 1, 22 / 1024)])
def test_exact_p(gained: int, lost: int, p: float) -> None:
    assert exact_p(gained, lost) == pytest.approx(p) == exact_p(lost, gained)


# ── recipes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_benchmark_recipe_is_one_that_its_flow_accepts() -> None:
    recipe = load_recipe("benchmarks/gpu/iteration.yaml")
    assert recipe.flow == "rlhf" and json.dumps(recipe.model_dump(mode="json"))


def test_the_overrides_that_the_readme_names_for_the_whole_algorithm_are_accepted() -> None:
    words = ["algorithm.minibatches=4", "algorithm.kl=loss", "algorithm.kl_coef=0.001"]
    assert all(word in Path("benchmarks/README.md").read_text() for word in words)
    assert recipe_of_shape("1.5b", words).algorithm.minibatches == 4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shapes_changes_are_accepted_and_given_ones_win(shape: str) -> None:
    recipe = recipe_of_shape(shape, ["rollout.groups=3"])
    assert samples_of(recipe) == 24 == concurrency_of(recipe)
    groups = int(OF_SHAPE.get(shape, {}).get("rollout.groups", 64))
    assert recipe_of_shape(shape).rollout.groups == groups


def test_the_smollm2_recipes_ask_the_same_question() -> None:
    recipes = [load_recipe(name) for name in list_recipes() if name.startswith("smollm2-")]
    assert sorted(r.flow for r in recipes) == ["evaluate", "rlhf", "rlhf", "sft"]
    assert len({r.data.model_dump_json() for r in recipes}) == 1
    assert len({r.model.max_length for r in recipes}) == 1


@pytest.mark.parametrize(
    ("result", "layout"),
    [
        (json.loads((RESULTS / "gpu-h200-asynchrony-split-4.json").read_text()), Layout(1, 1, 4)),
        (json.loads((RESULTS / "gpu-h200-asynchrony-shared-0.json").read_text()), Layout(2, 2, 0, shared=True)),
        ({"run": "split-1-abort", "gpus": 4}, Layout(2, 2, 1, mode="abort")),
        ({"run": "shared-0-equal", "gpus": 4}, Layout(4, 4, 0, shared=True)),
    ],
)
def test_a_run_is_simulated_on_as_many_gpus_as_it_had(result: dict[str, Any], layout: Layout) -> None:
    assert simulate_fixed_load.layout_of(result) == layout


# ── runs under one fixed load ───────────────────────────────────────────────────────────────────────────────────────


def loaded_run(run: str, restart: int, owners: bool) -> dict[str, Any]:
    """Twelve iterations: 7 s of training and 3 s of waiting, 600 s more before the one that a restart is in.

    After 5 and 10 a checkpoint takes 2 s more, and weights are written while 7 runs, which takes it 1 s more.
    """
    found: dict[str, Any] = {"run": run, "iterations": 60, "shape": "tiny", "lengths": [{"tokens": 40, "squares": 400}]}
    found |= {"trainer": {"backend": "deepspeed", "zero_stage": 3, "ranks": 2}, "memory": [{"rank": 0, "bytes": 2**30}]}
    found |= {name: [] for name in ("commits", "stages", "train", "publish", "samples")}
    clock = 0.0
    for k in range(12):
        clock += 600.0 * (k == restart)
        extra, closing = 1.0 * (k == 7), 2.0 * (k in (5, 10))
        for stage, began, took in (("rollout", clock, 3.0), ("train", clock + 3 + extra, 7.0)):
            found["stages"].append({"iteration": k, "stage": stage, "started": began, "seconds": took})
        clock += 10.0 + extra + closing
        commit = {"iteration": k, "committed": clock, "checkpoint_version": k + 1 if closing else None}
        commit["checkpoint_version"] = max([6 * (k >= 5), 11 * (k >= 10)]) or None
        found["commits"].append(commit | ({"owner": 1 + (k >= restart)} if owners else {}))
        found["train"].append({"iteration": k, "tokens": "1400", "seconds": 7.0})
        written = 0.5 * (k == 6)
        found["publish"].append({"iteration": k, "transport": "nccl", "write_seconds": written, "load_seconds": 0.25})
        found["stages"].append({"iteration": k, "stage": "publish", "started": clock, "seconds": 0.5})
    return found


def test_aborts_and_full_prefills_with_a_queue_are_read_from_sglangs_log() -> None:
    prefill = "Prefill batch, #new-seq: 9, #new-token: {}, #cached-token: 0, #running-req: 3, #queue-req: {}, "
    prefill += "input throughput (token/s): {}, cuda graph: False\n"
    said = prefill.format(8192, 40, "170000.50") + prefill.format(8192, 0, "9.00") + prefill.format(64, 7, "8.00")
    assert fixed_load.prefill_rates(said) == [170000.5]
    assert fixed_load.aborts(said + "All requests aborted, seconds: 0.043\n") == [0.043]


@pytest.mark.parametrize("owners", [True, False])
def test_a_restart_is_no_iterations_time(owners: bool) -> None:
    result = loaded_run("split-1-saves", 4, owners)
    assert fixed_load.starts(result) == [0, 4]
    assert fixed_load.intervals(result) == {1: 10, 2: 10, 3: 10, 5: 12, 6: 10, 7: 11, 8: 10, 9: 10, 10: 12, 11: 10}
    assert fixed_load.steady(result) == [2, 3, 6, 7, 8, 9, 10, 11]
    assert fixed_load.seconds(result) == 83 / 8
    assert fixed_load.starts(loaded_run("split-1-saves", 12, owners)) == [0]


def test_saving_is_told_from_waiting_for_groups() -> None:
    said = fixed_load.idle(loaded_run("split-1-saves", 4, True))
    assert "| 4 | restart |" in said
    assert "| 7 | 11.00 | 7.00 | 3.00 | 0.00 | 1.00 | 0.50 |" in said
    assert "2 checkpoints 4.00 s, 1 writes of weights 1.00 s, together 4.76%; waits for groups 30.0 s" in said


def test_the_table_of_training_has_the_share_of_one_ranks_chip() -> None:
    last = fixed_load.training([loaded_run("shared-0", 12, True)]).splitlines()[-1].split(" | ")
    used = mfu(SHAPES["tiny"], 1400 / 7 / 2, 10)
    assert last[2:] == ["deepspeed 3, ranks: 2", "11", "200", f"{used:.3f}", "1.0", "0.50", "0.25", "nccl |"]


def test_the_tokens_of_a_sample_count_evenly_over_its_time() -> None:
    load = Load(None, argparse.Namespace())  # type: ignore[arg-type]
    load.answers = [Answer("a", 0.0, 10.0, 100), Answer("a", 8.0, 12.0, 40), Answer("b", 0.0, 20.0, 1000)]
    assert load.rate(5.0, 10.0, ["a"]) == (100 * 5 / 10 + 40 * 2 / 4) / 5
    assert load.rate(0.0, 20.0, ["a", "b"]) == 1140 / 20 and load.rate(12.0, 20.0, ["a"]) == 0.0


# ── learning with η ─────────────────────────────────────────────────────────────────────────────────────────────────


def learned(variant: str, seconds: float, *accuracies: float) -> Learned:
    """A run of 20 iterations, evaluated at versions 0, 10 and 20."""
    elapsed, versions = [seconds * k for k in range(20)], (0, 10, 20)
    pairs = list(zip(versions, accuracies, strict=True))
    return Learned(variant, 1, [0.5] * 20, elapsed, accuracies[-1], 0, 0.0, pairs, 100, "0123456789", "a chip")


def test_runs_are_compared_after_equal_iterations_and_at_equal_wall_clock(capsys: pytest.CaptureFixture[str]) -> None:
    slow = learned("eta-0", 2.0, 0.1, 0.2, 0.4)
    assert accuracy_at(slow, 18.0) == pytest.approx(0.2)  # when iteration 9 had ended, which made version 10
    assert accuracy_at(slow, 19.0) == pytest.approx(0.21)
    print_comparison([slow, learned("eta-4", 1.0, 0.1, 0.2, 0.39)])
    *_, row, last = capsys.readouterr().out.splitlines()
    assert row == "| 1 | a chip | 01234567 | 100 | 20 | 39.00 40.00 | 19 | 20 10 | 39.00 21.00 |"
    assert "equal iterations -1.00 (one seed), at equal wall-clock +18.00 (one seed)" in last


def test_the_interval_is_students() -> None:
    assert interval([0.01, 0.02, 0.03]) == "+2.00 ± 2.48 (3 seeds)"  # 4.303 · 1 / √3
