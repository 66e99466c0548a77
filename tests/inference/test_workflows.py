"""Workflows: what single_turn asks for, what it records, and how a recipe names one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from example_workflow import Checked, Corrected
from waiting import LIMIT

from areal_tasks.data.sampler import sampling_seed
from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rollout.worker.apart import IsolatedWorkflow, LeasedClient
from areal_tasks.store.shards import content_digest
from areal_tasks.workflows import (
    Prompt,
    Sample,
    SingleTurn,
    WorkflowContext,
    check_values,
    load_workflow,
    samples_to_table,
)
from areal_tasks.workflows.single_turn import sample_of
from schemas.errors import UserError
from schemas.tables import ROLLOUT

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "workflow.md"


class Echo:
    """A client whose completions are the request's seed, digit by digit."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.requests += requests
        for _ in range(200 - requests[0].group):
            await asyncio.sleep(0)  # the last group ends first
        return [
            GenerateResult([5, 6], [-0.5, -0.25], [3, 4], f"text of {r.group}", "length", "http://s", 0.5, 1)
            for r in requests
        ]


class Mine:
    """A user's workflow."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        return []


class Earlier(Mine):
    """A workflow as it was once: of all prompts at a time."""

    async def run(self, prompts: Sequence[Prompt], context: WorkflowContext) -> list[Sample]:  # type: ignore[override]
        return []


def prompts() -> list[Prompt]:
    return [Prompt(10 + i, 100 + i, 2, f"question {i}", f"answer {i}", [1, 2, 3][: i + 1]) for i in range(3)]


def run(client: Echo) -> list[Sample]:
    context = WorkflowContext(
        client=cast(InferenceClient, client), seed=7, group_size=2, max_new_tokens=9, temperature=0.5, max_length=32,
        stop=("x",), generation=1,
    )  # fmt: skip

    async def work() -> list[list[Sample]]:
        return await asyncio.gather(*(SingleTurn().run(prompt, context) for prompt in prompts()))

    return [sample for group in asyncio.run(work()) for sample in group]


def test_single_turn_samples_each_prompt_with_seeds_of_its_own() -> None:
    client = Echo()
    run(client)
    expected = [sampling_seed(7, 100 + i, j, 1) for i in range(3) for j in range(2)]
    assert [r.seed for r in client.requests] == expected
    assert [r.group for r in client.requests] == [100, 100, 101, 101, 102, 102]
    assert {(r.max_new_tokens, r.temperature, r.stop) for r in client.requests} == {(9, 0.5, ("x",))}


def test_tokens_over_the_cache_of_older_weights_are_marked() -> None:
    result = GenerateResult([5, 6], [-0.5, -0.25], [3, 4], "ab", "stop", stale_kv=[False, True])
    prompt = Prompt(0, 0, 0, "q", "a", [1, 2, 3])
    sample = sample_of(prompt, 0, GenerateRequest(prompt.input_ids, 2), result)
    assert samples_to_table([sample])["stale_kv"].to_pylist() == [[False] * 4 + [True]]


def test_samples_become_a_rollout_table() -> None:
    table = samples_to_table(run(Echo()))
    assert table.schema == ROLLOUT
    row = table.to_pylist()[3]
    assert row["sample_id"] == "101-1"
    assert row["input_ids"] == [1, 2, 5, 6]
    assert row["loss_mask"] == [False, False, True, True]
    assert row["logprobs"] == [0.0, 0.0, -0.5, -0.25]
    assert row["versions"] == [-1, -1, 3, 4]
    assert (row["num_tokens"], row["num_generated"], row["version_min"], row["version_max"]) == (4, 2, 3, 4)
    assert (row["stop_reason"], row["truncated"], row["status"]) == ("length", True, "finished")
    assert (row["prompt"], row["completion"], row["answer"]) == ("question 1", "text of 101", "answer 1")


def test_lists_and_arrays_make_the_same_table() -> None:
    samples = run(Echo())
    expected = content_digest(samples_to_table(samples))
    for sample in samples:
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            setattr(sample, name, np.asarray(getattr(sample, name)).tolist())
    assert content_digest(samples_to_table(samples)) == expected
    samples[0].logprobs = [0.0, -0.1, -0.2]
    assert samples_to_table(samples)["logprobs"][0].as_py() == [0.0, *(np.float32(x) for x in (-0.1, -0.2))]


def test_the_check_of_samples_covers_all_that_a_workflow_gives() -> None:
    """A value that it lets pass, and that a column cannot hold, would fail all groups that are written with it."""
    sample = run(Echo())[0]
    check_values([sample])
    derived = {
        "sample_id",
        "group_id",
        "num_tokens",
        "num_generated",
        "truncated",
        "version_min",
        "version_max",
        "status",
    }
    for name in set(ROLLOUT.names) - derived:
        wrong: dict[str, Any] = {name: object()}
        if name in ("prompt_id", "epoch", "prompt", "answer"):
            wrong = {"prompt": replace(sample.prompt, **wrong)}
        with pytest.raises((TypeError, pa.ArrowException)):
            check_values([replace(sample, **wrong)])


def test_a_sample_without_output_has_no_version() -> None:
    sample = run(Echo())[0]
    sample.input_ids, sample.loss_mask, sample.versions, sample.logprobs = [1], [False], [-1], [0.0]
    sample.stop_reason = "abort"
    [row] = samples_to_table([sample]).to_pylist()
    assert (row["num_generated"], row["version_min"], row["status"], row["truncated"]) == (0, -1, "aborted", False)


def test_workflows_are_found_by_name() -> None:
    assert isinstance(load_workflow("single_turn", {}), SingleTurn)
    mine = load_workflow(f"{__name__}:Mine", {"turns": 3})
    assert type(mine).__name__ == "Mine"
    assert cast(Any, mine).turns == 3


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("single_turn", {"turns": 2}, "takes none"),
        ("multi_turn", {}, "neither"),
        ("no.such.module:x", {}, "cannot be imported"),
        ("json:nothing", {}, r"json \(.*\) has no 'nothing'"),
        ("json:JSONDecoder", {}, "no `run` method"),
        (f"{__name__}:Mine", {"rounds": 1}, "does not accept"),
        (f"{__name__}:Earlier", {"turns": 1}, "It makes one group now"),
    ],
)
def test_a_workflow_that_cannot_be_used_is_explained(name: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_workflow(name, arguments)


class Answering(Echo):
    """A client that ends each completion by itself."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.requests += requests
        turn = len(self.requests[-1].input_ids)
        return [
            GenerateResult([turn, 6], [-0.5, -0.25], [3, 4], f"after {turn}", "stop", "s", 0.5, 1, [False, True])
            for _ in requests
        ]


@pytest.mark.parametrize(("max_length", "turns"), [(32, 2), (6, 1)])
def test_the_example_of_the_guide_asks_twice_where_there_is_room(max_length: int, turns: int) -> None:
    client, asked = Answering(), SimpleNamespace(input_ids=[8, 9])
    context = WorkflowContext(
        cast(InferenceClient, client), 7, 2, 9, 0.5, max_length, tokenizer=lambda *_, **__: vars(asked)
    )
    samples = asyncio.run(Checked("Sure?").run(prompts()[1], context))
    rows = samples_to_table(samples).to_pylist()
    assert [row["sample_id"] for row in rows] == ["101-0", "101-1"] and {row["turns"] for row in rows} == {turns}
    if turns == 1:
        assert rows[0]["input_ids"] == [1, 2, 2, 6] and rows[0]["completion"] == "after 2"
        return
    assert client.requests[-1].input_ids == [1, 2, 2, 6, 8, 9] and client.requests[-1].max_new_tokens == 9
    row = rows[0]
    assert row["input_ids"] == [1, 2, 2, 6, 8, 9, 6, 6]
    assert row["loss_mask"] == [False, False, True, True, False, False, True, True]
    assert row["logprobs"] == [0, 0, -0.5, -0.25, 0, 0, -0.5, -0.25]
    assert row["versions"] == [-1, -1, 3, 4, -1, -1, 3, 4]
    assert row["stale_kv"] == [False, False, False, True, False, False, False, True]
    assert (row["completion"], row["seconds"], row["num_generated"]) == ("after 6", 1.0, 4)


@pytest.mark.parametrize("right", [True, False])
def test_the_example_that_corrects_itself_asks_again_where_the_first_answer_is_wrong(right: bool) -> None:
    asked: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def verify(sample: Sample) -> VerifyResult:
        asked.append((sample.completion, asyncio.get_running_loop()))
        return VerifyResult(float(right), "correct" if right else "incorrect", "", "", "mine", 0.0)

    async def work() -> list[Sample]:
        client = LeasedClient(cast(InferenceClient, Answering()), 0)
        tokenizer = lambda *_, **__: {"input_ids": [8, 9]}  # noqa: E731
        here = lambda sample: client.here(verify(sample))  # noqa: E731
        context = WorkflowContext(cast(Any, client), 7, 1, 9, 0.5, 32, tokenizer=tokenizer, verify=here)
        isolated = IsolatedWorkflow(Corrected("?"), LIMIT)
        samples = await isolated.run(prompts()[1], context)
        isolated.close()
        assert [loop for _, loop in asked] == [asyncio.get_running_loop()], "that of the client"
        return samples

    [sample] = asyncio.run(work())
    assert [completion for completion, _ in asked] == ["after 2"]
    assert (sample.turns, sample.completion) == ((1, "after 2") if right else (2, "after 6"))


def test_a_workflow_that_asks_for_verdicts_must_say_so() -> None:
    context = WorkflowContext(cast(InferenceClient, Echo()), 7, 1, 9, 0.5, 32)
    with pytest.raises(UserError, match=r"workflow\.verifies: .*set it to true"):
        asyncio.run(context.verify(run(Echo())[0]))  # type: ignore[arg-type]


def test_the_guide_quotes_the_example_verbatim() -> None:
    assert f"```python\n{Path(__file__).with_name('example_workflow.py').read_text()}```" in PAGE.read_text()
