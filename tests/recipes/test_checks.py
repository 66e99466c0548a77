"""Each contradiction and each knob without effect is refused, naming the field and the remedy."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.errors import UserError
from schemas.recipe import checks
from schemas.recipe.derived import interruption
from schemas.recipe.load import RECIPES, load_recipe
from schemas.recipe.no_effect import NO_EFFECT
from schemas.recipe.recipe import BaseRecipe, RlhfRecipe

#: (field, recipe, overrides, message)
REFUSED = [
    ("model", "quickstart", "model.warm_start=''", "exactly one of path, scratch and warm_start.*none is given"),
    ("model", "quickstart", "model.path=x", "both path and warm_start are given"),
    ("model.warm_start", "quickstart-sft", "model={warm_start: x, max_length: 16}", "only an rlhf recipe can"),
    ("model.path", "gsm8k", "model.path=run://a/b", "should look like run://NAME or run://NAME@VERSION"),
    ("model.scratch", "quickstart-sft", "model.scratch.heads=3", "an even multiple of heads 3"),
    ("model.scratch.alphabet", "quickstart-sft", "model.scratch.alphabet='0123456789+=='", "occurs twice"),
    ("model.scratch.alphabet", "quickstart-sft", "model.scratch.alphabet='012+='", "need the characters 3456789 too"),
    ("data.chat", "quickstart-sft", "data.chat=true", "a scratch model has no chat template"),
    ("data.template", "gsm8k", "data.template='{question}'", r"data\.template: must contain \{prompt\}"),
    ("data.source", "quickstart", "data.source=''", r"data\.source: is empty; name a data set"),
    ("data.source", "quickstart", "data.source=s3://bucket/rows.csv", r"should end with \.jsonl, \.json, \.parquet"),
    ("data.source", "quickstart", "data.source='owner/{split}'", "is for files"),
    ("launcher.network", "quickstart", "launcher.type=slurm", "needs the network in which services listen, such as"),
    ("launcher.network", "quickstart", "launcher={type: slurm, network: eth0}", "'eth0' is no network; write it by"),
    ("launcher.network", "quickstart", "launcher.network=10.0.0.0/24", "has no effect with launcher.type local"),
    ("trainer.replicas", "gsm8k", "trainer={backend: fsdp2, ranks: 4, replicas: 3}", "4 ranks cannot be split evenly"),
    (
        *("trainer.replicas", "quickstart"),
        "trainer={backend: fsdp2, ranks: 12, nodes: 4, replicas: 6} & launcher={type: slurm, network: 10.0.0.0/24}",
        "6 copies would be split across 4 machines",
    ),
    ("trainer.replicas", "quickstart", "trainer.replicas=2", "unless trainer.backend is fsdp2"),
    ("trainer.nodes", "quickstart", "trainer.nodes=2", "1 ranks cannot be split evenly over 2 machines"),
    ("trainer.micro_batch_tokens", "gsm8k", "trainer.micro_batch_tokens=512", "no sample of model.max_length 1024"),
    ("trainer.lr_schedule", "gsm8k", "trainer.lr_schedule=cosine", "no effect with lr_final 1; set lr_final below 1"),
    ("trainer.warmup_steps", "quickstart", "trainer.warmup_steps=1000", "1000 is not over within the run's 1000 steps"),
    ("trainer.warmup_steps", "quickstart", "trainer.warmup_steps=999", "leaves one of the run's 1000 steps, at"),
    ("trainer.warmup_steps", "quickstart-sft", "trainer.warmup_steps=125", "within the run's 125 steps"),
    ("evaluation.max_new_tokens", "gsm8k", "evaluation.max_new_tokens=1024", "leaves no room for a prompt"),
    ("evaluation.samples", "evaluate-gsm8k", "evaluation.samples=4", "greedy completions are all the same; set"),
    ("evaluation.stop", "quickstart", "evaluation.stop=['']", "evaluation.stop: an empty string"),
    ("reward.wall_seconds", "gsm8k", "reward.wall_seconds=5", "before it can use reward.timeout_seconds 10 of CPU"),
    ("rollout.max_new_tokens", "quickstart", "rollout.max_new_tokens=16", "16 leaves no room for a prompt"),
    ("rollout.stop", "quickstart", "rollout.stop=['']", "rollout.stop: an empty string"),
    ("rollout.group_size", "quickstart", "rollout.group_size=1", "a group of 1 .*set reward_norm to none"),
    ("algorithm.minibatches", "quickstart", "algorithm.minibatches=7", "7 does not .* = 256; the nearest that do: 4"),
    ("algorithm.minibatches", "quickstart", "algorithm.minibatches=257", "the nearest that do: 256"),
    ("algorithm.kl", "quickstart", "algorithm.kl=loss", "loss has no effect with kl_coef 0; set kl_coef above 0"),
    ("data.eval_split", "quickstart", "data.eval_split=train", "'train' is the training split; name a held-out split"),
    ("evaluation.every", "quickstart", "data.source=rows.jsonl", "evaluation would read the training data"),
    ("store.url", "quickstart", "store.url=s3://user:secret@host/x", "holds credentials; replace them"),
    (
        "inference.release_memory",
        "gsm8k",
        "rollout.max_head_offpolicyness=1 & inference.release_memory=true",
        "cannot release their memory while they generate",
    ),
    ("trainer.nodes", "gsm8k", "trainer={ranks: 2, nodes: 2}", "2 machines need a launcher.type of several"),
    (
        "trainer.nodes",
        "sft-gsm8k",
        "trainer={backend: fsdp2, ranks: 2, nodes: 2} & launcher={type: ray, network: 10.0.0.0/24}",
        "gloo and NCCL encrypt nothing: .*; set launcher.trust_network=true if launcher.network is safe",
    ),
    ("launcher.trust_network", "gsm8k", "launcher.trust_network=true", "has no effect without launcher.network"),
    (
        "inference.transport",
        "gsm8k",
        "inference.transport=nccl & launcher={type: ray, network: 10.0.0.0/24}",
        "NCCL encrypts nothing: weights; set launcher.trust_network=true",
    ),
    ("rollout.bound", "quickstart", "rollout.bound=admission", "groups wait for new weights"),
    ("rollout.interruption", "quickstart", "rollout.interruption=abort", "groups wait for new weights"),
    (
        "rollout.worker_memory_mb",
        "quickstart",
        "launcher.type=inline & rollout.worker_memory_mb=900",
        "with launcher.type inline: no processes",
    ),
    ("launcher.ray.resources", "quickstart", "launcher.ray.resources.fast=1", "without launcher.type ray"),
    ("launcher.ray.autoscaling", "quickstart", "launcher.ray.autoscaling=true", "without launcher.type ray"),
    *(
        (f"launcher.slurm.{name}", "quickstart", f"launcher.slurm.{name}={value}", "without launcher.type slurm")
        for name, value in {
            **dict.fromkeys(("partition", "account", "qos", "constraint", "container", "setup"), "some"),
            "time": "1-12:00:00",
            "options": "[--exclusive]",
        }.items()
    ),
    ("rollout.pace", "quickstart", "rollout.pace=4", "groups wait for new weights"),
    ("rollout.filters.arguments", "quickstart", "rollout.filters.arguments.x=1", "without rollout.filters.function"),
    ("rollout.filters.max_rejected", "quickstart", "rollout.filters.max_rejected=9", "without a filter"),
    (
        "rollout.filters.equal_rewards",
        "quickstart",
        "rollout={group_size: 1, filters: {equal_rewards: true}}",
        "rejects every group of rollout.group_size 1",
    ),
    (
        "rollout.filters.min_success",
        "quickstart",
        "rollout.filters={min_success: 0.6, max_success: 0.5}",
        "min_success: 0.6 is above max_success 0.5",
    ),
    ("inference.deterministic", "gsm8k", "inference.deterministic=false", "with inference.engine sglang"),
    ("inference.slots", "gsm8k", "inference.slots=8", "with inference.engine sglang"),
    ("inference.threads", "gsm8k", "inference.threads=2", "with inference.engine sglang"),
    ("data.system", "quickstart", "data.system=hi", "set data.chat to true"),
    ("data.subset", "quickstart", "data.subset=main", "unless data.source is the name of a Hugging Face data set"),
    ("data.prompt_column", "quickstart", "data.prompt_column=q", "with sums://"),
    ("data.answer_column", "quickstart", "data.answer_column=a", "with sums://"),
    ("data.train_split", "evaluate-gsm8k", "data.train_split=x", "which reads data.eval_split"),
    ("data.train_split", "gsm8k", "data={source: a.jsonl, train_split: x}", "with a file whose name has no {split}"),
    ("data.eval_split", "sft-gsm8k", "data.eval_split=x", "where nothing is evaluated"),
    ("data.eval_split", "evaluate-gsm8k", "data={source: a.jsonl, eval_split: x}", "with a file whose name has no"),
    ("workflow.arguments", "gsm8k", "workflow.arguments.x=1", "with workflow.name single_turn"),
    ("workflow.blocked_seconds", "gsm8k", "workflow.blocked_seconds=9", "with workflow.name single_turn"),
    ("workflow.verifies", "gsm8k", "workflow.verifies=true", "with workflow.name single_turn"),
    ("reward.unverified_reward", "gsm8k", "reward.unverified_reward=1", "unless reward.on_unverified is reward"),
    ("algorithm.kl_coef", "quickstart", "algorithm.kl_coef=0.1", "set it to reward or loss"),
    ("algorithm.clip_ratio", "quickstart", "algorithm={clip_ratio: 0.1}", "with one minibatch"),
    ("algorithm.tis_cap", "quickstart", "algorithm.tis_cap=3", "on the CPU in float32"),
    ("algorithm.tis_cap", "gsm8k", "algorithm={tis_bound: mask, tis_cap: 3}", "tis_bound mask"),
    ("algorithm.tis_cap", "gsm8k", "algorithm={decoupled: false, tis_cap: 3}", "no weight is used"),
    ("algorithm.tis_low", "gsm8k", "algorithm.tis_low=0.9", "unless tis_bound is mask"),
    ("algorithm.tis_high", "gsm8k", "algorithm.tis_high=3", "unless tis_bound is mask"),
    ("algorithm.tis_bound", "quickstart", "algorithm.tis_bound=mask", "on the CPU in float32"),
    ("algorithm.tis_level", "gsm8k", "algorithm={decoupled: false, tis_level: sequence}", "no weight"),
    ("algorithm.decoupled", "quickstart", "algorithm.decoupled=false", "rollout.max_head_offpolicyness 0"),
    ("alerts.min_effective_sample_size", "gsm8k", "alerts.min_effective_sample_size=.3", "it is not measured"),
    ("alerts.max_behaviour_clipped", "gsm8k", "alerts.max_behaviour_clipped=.3", "it is not measured"),
    ("alerts.max_lag_beyond", "quickstart-async", "alerts.max_lag_beyond=3", "no lag exceeds η"),
    ("trainer.head_chunk_tokens", "gsm8k", "trainer.head_chunk_tokens=1000000", "below trainer.micro_batch_tokens"),
    ("inference.tensor_parallel", "quickstart", "inference.tensor_parallel=2", "only SGLang uses it"),
    ("inference.gpus", "quickstart", "inference.gpus=[0]", "only SGLang uses it"),
    ("inference.memory_fraction", "quickstart", "inference.memory_fraction=0.5", "only SGLang uses it"),
    ("inference.first_port", "quickstart", "inference.first_port=30000", "only SGLang uses it"),
    ("inference.release_memory", "quickstart", "inference.release_memory=true", "only SGLang uses it"),
    ("inference.transport", "quickstart", "inference.transport=nccl", "only SGLang uses it"),
    ("inference.prove_weights", "quickstart", "inference.prove_weights=false", "only SGLang uses it"),
    ("inference.flags", "quickstart", "inference.flags={attention-backend: triton}", "only SGLang uses it"),
    ("trainer.weights_every", "quickstart", "trainer.weights_every=5", "would keep new weights from the servers"),
    ("trainer.lr_final", "gsm8k", "trainer.lr_final=0.1", "set it to linear or cosine"),
    ("trainer.zero_stage", "gsm8k", "trainer.zero_stage=3", "unless trainer.backend is deepspeed"),
    ("trainer.cpu_offload", "quickstart", "trainer.cpu_offload=true", "with trainer.backend local, or with"),
    ("evaluation.every", "evaluate-gsm8k", "evaluation.every=5", "which evaluates once"),
    ("evaluation.limit", "quickstart", "evaluation={limit: 5}", "nothing is evaluated .evaluation=.. clears"),
    ("evaluation.samples", "quickstart", "evaluation={samples: 2, temperature: 1}", "nothing is evaluated"),
    ("evaluation.temperature", "quickstart", "evaluation={temperature: 1}", "nothing is evaluated"),
    ("evaluation.max_new_tokens", "quickstart", "evaluation={max_new_tokens: 5}", "nothing is evaluated"),
    ("evaluation.group_seconds", "quickstart", "evaluation={group_seconds: 9}", "nothing is evaluated"),
    ("evaluation.stop", "quickstart", "evaluation={stop: [x]}", "nothing is evaluated"),
    *(
        (override.split("=")[0], "gsm8k", f"inference.servers=2 & inference.tensor_parallel=2 & {override}", message)
        for override, message in (
            ("inference.flags={api-key: x}", "a recipe cannot set api-key; leave it out, since the bearer token"),
            ("inference.flags={tp_size: 2}", "a recipe cannot set tp_size; set inference.tensor_parallel instead"),
            ("inference.flags={random-seed: 2}", "a recipe cannot set random-seed; set seed instead"),
            ("inference.flags={host: 0.0.0.0}", "a recipe cannot set host; leave it out, since the service sets it"),
            ("inference.flags={--host: 0.0.0.0}", "a recipe cannot set --host"),
            ("inference.flags={ssl-keyfile: k}", "a recipe cannot set ssl-keyfile; leave it out, since the service"),
            ("inference.flags={--log-level: info}", "write log-level without the dashes"),
            ("inference.flags={disable-radix-cache: false}", "disable-radix-cache: false has no effect; leave it"),
            ("inference.flags={nnodes: 2}", "a recipe cannot set nnodes; set inference.nodes instead"),
            ("inference.nodes=3", "the 2 GPUs of inference.tensor_parallel cannot be split evenly over 3 machines; "),
            (
                "inference.nodes=2 & launcher={type: slurm, network: 10.0.0.0/24}",
                r"encrypts nothing, prompts included.*set launcher\.trust_network=true if launcher\.network is safe",
            ),
            ("inference.gpus=[0]", "names 1, but 2 servers of 2 GPUs each need 4"),
            ("inference.gpus=[0,0,1,2]", "one server's GPUs must differ"),
            ("trainer.gpus=[0,1]", "names 2 GPUs for 1 ranks"),
            ("inference.first_port=65535", "2 servers from 65535 need ports to 65536"),
            ("launcher.type=inline", "SGLang needs processes; use local"),
        )
    ),
    (
        "inference.flags",
        "gsm8k",
        "inference.flags={kv_events_config: x} & launcher={type: slurm, network: 10.0.0.0/24}",
        r"cannot set kv_events_config with launcher\.network; leave it out, since",
    ),
    (
        "inference.release_memory",
        "gsm8k",
        "inference.release_memory=true & inference.gpus=[0] & trainer.gpus=[1]",
        r"has no effect, since inference\.gpus and trainer\.gpus",
    ),
    ("trainer.gpus", "sft-gsm8k", "trainer={gpus: [0, 1, 2], ranks: 2}", "names 3 GPUs for 2 ranks"),
    ("rollout.top_p", "quickstart", "rollout.top_p=0.9", "a trainer cannot reproduce the probabilities of truncated"),
    ("rollout.top_k", "quickstart", "rollout.top_k=50", "sampled from the whole vocabulary"),
    ("rollout.min_p", "quickstart", "rollout.min_p=0.1", "sampled from the whole vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "recipe", "override", "message"), REFUSED)
def test_refused(field: str, recipe: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("{split}", r"\{split\}")) as caught:
        load_recipe(recipe, override.split(" & "))
    assert f"- {field}: " in str(caught.value)


def test_every_message_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {node.lineno for node in ast.walk(ast.parse(inspect.getsource(checks))) if isinstance(node, ast.Yield)}
    seen: set[int] = set()

    def noting(check: Callable[[Any], Iterator[str]]) -> Callable[[BaseRecipe], Iterator[str]]:
        def noted(recipe: BaseRecipe) -> Iterator[str]:
            messages = check(recipe)
            for message in messages:
                seen.add(innermost_line(messages))
                yield message

        return noted

    for model in RECIPES.values():
        monkeypatch.setattr(model, "CHECKS", [noting(check) for check in model.CHECKS])
    monkeypatch.setattr(checks, "credentials", noting(checks.credentials))
    for _, recipe, override, _ in REFUSED:
        with pytest.raises(UserError):
            load_recipe(recipe, override.split(" & "))
    assert lines <= seen
    assert {field for row in NO_EFFECT for field in row.fields} <= {case[0] for case in REFUSED}


def innermost_line(generator: Any) -> int:
    """The line of the `yield` at which a generator, or the one that it delegates to, has stopped."""
    while inspect.isgenerator(generator.gi_yieldfrom):
        generator = generator.gi_yieldfrom
    return int(generator.gi_frame.f_lineno)


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("quickstart", [], None),
        ("quickstart", ["rollout.max_head_offpolicyness=1"], "in_place"),
        ("quickstart", ["rollout.max_head_offpolicyness=1", "rollout.interruption=drain"], "drain"),
        ("gsm8k", ["rollout.max_head_offpolicyness=1"], "in_place"),
        ("gsm8k", ["rollout.max_head_offpolicyness=1", "rollout.interruption=drain"], "drain"),
        ("evaluate-gsm8k", [], None),
    ],
)
def test_new_weights_interrupt_in_place_unless_the_recipe_says_otherwise(
    recipe: str, overrides: list[str], expected: str | None
) -> None:
    assert interruption(load_recipe(recipe, overrides)) == expected


ALLOWED = [
    ("quickstart", ["rollout.group_size=1", "algorithm.reward_norm=none"]),
    ("quickstart", ["algorithm.kl=reward", "algorithm.kl_coef=0.01"]),
    ("quickstart", ["rollout.filters.equal_rewards=true", "rollout.filters.max_rejected=9"]),
    ("quickstart", ["rollout.filters={function: my.module:short, arguments: {most: 5}}"]),
    ("quickstart", ["evaluation.samples=4", "evaluation.temperature=0.7"]),
    ("quickstart", ["evaluation={}"]),
    ("quickstart", ["data.source=rows-{split}.jsonl", "data.prompt_column=text", "data.eval_split=held-out"]),
    ("quickstart", ["data.source=s3://bucket/rows.parquet", "evaluation={}"]),
    ("quickstart", ["model.warm_start=''", "model.path=run://teacher@12"]),
    ("gsm8k", ["reward.on_unverified=reward", "reward.unverified_reward=-1"]),
    ("gsm8k", ["reward.timeout_reward=null", "reward.timeout_seconds=100", "reward.wall_seconds=100"]),
    ("gsm8k", ["workflow.name=my.module:turns", "workflow.arguments.turns=3"]),
    ("gsm8k", ["data.system=Think first."]),
    ("gsm8k", ["trainer.lr_schedule=cosine", "trainer.lr_final=0.1"]),
    ("quickstart", ["trainer.backend=deepspeed", "trainer.zero_stage=3", "trainer.cpu_offload=true"]),
    ("evaluate-gsm8k", ["inference.engine=embedded", "inference.slots=32", "inference.deterministic=false"]),
]


@pytest.mark.parametrize(("recipe", "overrides"), ALLOWED)
def test_what_the_remedies_say_is_accepted(recipe: str, overrides: list[str]) -> None:
    load_recipe(recipe, overrides)


def test_a_form_that_skips_the_loader_is_checked_too() -> None:
    values = load_recipe("quickstart").model_dump()
    values["algorithm"]["minibatches"] = 7
    with pytest.raises(ValidationError, match="7 does not divide"):
        RlhfRecipe.model_validate(values)
