"""The sections of a recipe, shared by the flows. Those of training are in `training`, the launcher's in `launcher`."""

from __future__ import annotations

from typing import Any, Final, Literal

from schemas.recipe.derived import Interruption
from schemas.recipe.fields import Section, operational, section, semantic

#: Why groups are rejected: all attempts failed, or one of the filters below applies.
REASONS: Final = ("failed", "equal_rewards", "min_success", "max_success", "function")


class ScratchModel(Section):
    """A small character-level Llama with random weights: no download, for the quickstart and for tests."""

    layers: int = semantic(2, ge=1, le=64, description="Transformer layers.")
    hidden: int = semantic(128, ge=16, le=4096, description="Width of the residual stream.")
    heads: int = semantic(4, ge=1, le=64, description="Attention heads; divides `hidden`.")
    intermediate: int = semantic(344, ge=16, le=16384, description="Width of the feed-forward layer.")
    alphabet: str = semantic("0123456789+=", min_length=2, description="Characters of the vocabulary.")


class Model(Section):
    """The policy's initial weights (version 0) and tokenizer. Exactly one of `path`, `scratch`, `warm_start`."""

    path: str = semantic(
        "",
        description="Hugging Face folder or model name, or the weights of a run: `run://NAME` or `run://NAME@VERSION`.",
    )
    scratch: ScratchModel | None = semantic(None, description="Create a small character-level model instead.")
    warm_start: str = semantic(
        "", description="An SFT recipe to run first (`NAME-sft`); its last weights are version 0."
    )
    max_length: int = semantic(1024, ge=8, le=1_048_576, description="Tokens a sample may have, prompt included.")
    dtype: Literal["float32", "bfloat16"] = semantic("float32", description="Precision of the forward pass.")


class Data(Section):
    """The prompts and their answers."""

    source: str = semantic(
        description="Data-set name, JSONL/Parquet path (also from the recipe's folder) or URL, `{split}` replaced; or `sums://TERMS`."
    )
    subset: str = semantic("", description="Configuration name of a Hugging Face data set.")
    train_split: str = semantic("train", min_length=1, description="Training split.")
    eval_split: str = semantic("test", min_length=1, description="Held-out split that `evaluate` reads.")
    prompt_column: str = semantic("question", min_length=1, description="Column with the prompt.")
    answer_column: str = semantic("answer", min_length=1, description="Column with the reference answer.")
    template: str = semantic("{prompt}", description="How a row becomes the user's message; must contain `{prompt}`.")
    system: str = semantic("", description="System message; needs `chat`.")
    chat: bool = semantic(False, description="Apply the tokenizer's chat template.")
    on_long_prompt: Literal["error", "drop"] = semantic(
        "error", description="A prompt that leaves no room for a completion stops the run, or is left out and counted."
    )
    limit: int = semantic(0, ge=0, le=10**9, description="Use only the first rows of each split; 0 is all.")


class Filters(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): rejects finished groups by their rewards.

    With a filter, groups are verified as they finish. Each rejected group is replaced by one group of the next prompt.
    Samples without a reward do not count; a group in which no sample has a reward is not rejected.
    """

    equal_rewards: bool = semantic(
        False, before=False, description="Reject groups whose rewards are all equal: GRPO learns nothing from them."
    )
    min_success: float = semantic(
        0.0, before=0.0, ge=0, le=1, description="Reject groups in which a smaller share of the samples is `correct`."
    )
    max_success: float = semantic(
        1.0, before=1.0, ge=0, le=1, description="Reject groups in which a greater share of the samples is `correct`."
    )
    function: str = semantic(
        "",
        before="",
        description="Your own filter, as `package.module:object`: called with a group's samples, their rewards and "
        "`arguments`, it returns the reason to reject the group, or nothing.",
    )
    arguments: dict[str, Any] = semantic({}, before={}, description="Keyword arguments of `function`.")
    max_rejected: int | None = operational(
        None,
        ge=1,
        le=1_000_000_000,
        description="The run stops at this many rejected groups while a batch is filled; none: ten batches' worth.",
    )

    @property
    def active(self) -> bool:
        return bool(self.equal_rewards or self.min_success > 0 or self.max_success < 1 or self.function)


class Rollout(Section):
    """How completions are sampled for training: from the whole vocabulary, since a trainer can reproduce only that."""

    groups: int = semantic(32, ge=1, le=65536, description="Prompts per iteration.", live=True)
    group_size: int = semantic(8, ge=1, le=1024, description="Completions per prompt.")
    max_new_tokens: int = semantic(256, ge=1, le=131072, description="Longest completion, in tokens.")
    temperature: float = semantic(1.0, ge=1e-3, le=10, description="Softmax temperature; logprobs are taken at it too.")
    stop: list[str] = semantic([], description="Strings that end a completion (kept in it).")
    max_head_offpolicyness: int = semantic(
        0,
        before=0,
        ge=0,
        le=1024,
        description="η, maximum staleness: versions between the newest weights and those with which a sample began. "
        "0 is synchronous: each sample is generated by the weights that train on it.",
        live=True,
    )
    bound: Literal["strict", "admission"] = semantic(
        "strict",
        before="strict",
        description="`strict`: η is never exceeded. `admission`: only the number of groups that begin is bounded, "
        "as in AReaL; slow groups may exceed η, and training does not wait for them.",
    )
    interruption: Interruption | None = semantic(
        None,
        before=None,
        description="What new weights do to samples in flight. `in_place`: they continue with the KV cache of older "
        "weights, and their tokens are marked. `abort`: their cache is recomputed. `drain`: the update waits until "
        "they finish. None: `in_place`.",
    )
    pace: int | None = operational(
        None,
        ge=0,
        description="Groups that may begin beyond those of the next iteration; none: as many as η allows.",
        live=True,
    )
    workers: int = operational(
        1,
        ge=1,
        le=256,
        description="Rollout workers: processes that run the groups' workflow. One keeps many servers busy; more help "
        "workflows that themselves need much CPU.",
        live=True,
    )
    groups_in_memory: int = operational(
        1024,
        ge=0,
        le=1_000_000,
        description="Generated groups, verified or not, with which a worker gets no others: it writes finished ones to "
        "the store at once, and finishes those under way. 0 means 1. Not in evaluations.",
    )
    worker_memory_mb: int = operational(
        0,
        ge=0,
        le=1_048_576,
        description="Memory of a rollout worker's process above which it gets no more groups, finishes and writes "
        "those that it has, and is restarted; 0: no limit. Not in evaluations.",
    )
    flush_seconds: float = operational(
        30.0,
        ge=0,
        le=86400,
        description="Seconds after which a finished group that no iteration has taken is written to the store.",
    )
    group_seconds: float = operational(
        3600.0,
        gt=0,
        le=864000,
        description="Time limit of one attempt at a group in seconds, waits for servers included.",
    )
    group_attempts: int = operational(
        3,
        ge=1,
        le=1000,
        description="Failed attempts at a group after which it is rejected; likewise ends of its rollout worker while "
        "that generated only this group.",
        live=True,
    )
    max_failed_groups: int = operational(
        32,
        ge=0,
        le=1_000_000,
        description="Groups that may fail all attempts in one start of the flow; more stop the run.",
        live=True,
    )
    filters: Filters = section(Filters, "Dynamic sampling: which finished groups are not trained on.")


class Workflow(Section):
    """How one group of samples is produced."""

    name: str = semantic(
        "single_turn",
        description="`single_turn`, or your own as `package.module:object`. The groups of a rollout worker share an "
        "event loop: a blocking call delays all of them, so use `await asyncio.to_thread(...)` for it.",
    )
    arguments: dict[str, Any] = semantic({}, description="Keyword arguments of your own workflow.")
    verifies: bool = semantic(
        False,
        before=False,
        description="Your own workflow asks for verdicts (`context.verify`): the settings of `reward` are then part of "
        "what decides the content of groups.",
    )
    blocked_seconds: float = operational(
        60.0,
        gt=0,
        le=86400,
        description="Seconds that a call may block a rollout worker's event loop; beyond, its group's attempt fails, "
        "and the worker's other groups begin again.",
    )


class Reward(Section):
    """How a completion is judged, in processes that can be killed."""

    verifier: str = semantic("math", description="`math`, `exact`, or your own as `package.module:object`.")
    arguments: dict[str, Any] = semantic({}, description="Keyword arguments of the verifier.")
    unparseable_reward: float = semantic(
        0.0, ge=-1e3, le=1e3, description="Reward if the completion contains no answer."
    )
    timeout_reward: float | None = semantic(
        0.0, before=None, ge=-1e3, le=1e3, description="Reward of a `timeout` verdict; null: treated as an `error`."
    )
    on_unverified: Literal["drop_sample", "drop_group", "reward"] = semantic(
        "drop_sample", description="What to do with a sample with an `error` verdict."
    )
    unverified_reward: float = semantic(0.0, ge=-1e3, le=1e3, description="The reward if `on_unverified` is `reward`.")
    max_unverified: float = semantic(
        0.2, ge=0, le=1, description="Share of `error` verdicts (and of `timeout` without a reward) that stops the run."
    )
    timeout_seconds: float = semantic(
        10.0, gt=0, le=3600, description="CPU seconds that one completion may take, with all processes it starts."
    )
    wall_seconds: float = operational(
        0.0,
        ge=0,
        le=864_000,
        description="Wall-clock seconds after which a verifier is ended, an `error`; 0: 60 times `timeout_seconds`.",
    )
    memory_mb: int = semantic(
        2048, ge=128, le=1_048_576, description="Address space that a verifier may use beyond that at its start."
    )
    workers: int = operational(
        2, ge=1, le=256, description="Verifier processes of the flow, and of each rollout worker that verifies groups."
    )


class Inference(Section):
    """The servers that generate."""

    engine: Literal["embedded", "sglang"] = semantic("embedded", description="Inference engine.")
    deterministic: bool = semantic(True, description="Embedded: results do not depend, bitwise, on the batch.")
    servers: int = operational(1, ge=1, le=1024, description="Number of servers.", live=True)
    slots: int = semantic(64, ge=4, le=4096, description="Embedded: sequences decoded together.")
    groups_per_request: int = operational(1, ge=1, le=1024, description="Groups sent in one HTTP request.")
    max_concurrent_requests: int = operational(
        64, ge=1, le=65536, description="Requests in flight per server.", live=True
    )
    tensor_parallel: int = operational(1, ge=1, le=64, description="SGLang: GPUs that share one server's model.")
    nodes: int = operational(1, ge=1, le=64, description="SGLang: machines over which each server's GPUs are split.")
    gpus: list[int] = operational(
        [], description="Numbers of the servers' GPUs; empty: those after the trainer's, or the same if none are left."
    )
    memory_fraction: float = operational(
        0.0,
        ge=0,
        lt=1,
        description="SGLang: share of a GPU's memory for weights and cache; 0: its default, or part of a shared GPU.",
    )
    first_port: int = operational(
        0, ge=0, le=65535, description="SGLang: server i listens on this port + i; 0: any free ports."
    )
    transport: Literal["auto", "store", "tensor", "nccl"] = operational(
        "auto",
        description="How new weights reach the servers: through the store, as tensors on a shared GPU, between GPUs "
        "by NCCL; `auto`: the fastest that the placement allows, between machines the store (NCCL does not encrypt).",
    )
    release_memory: bool = operational(
        False, description="SGLang: release the GPU's memory while the trainer works (both on the same GPU)."
    )
    prove_weights: bool = operational(
        True,
        description="SGLang: send the servers the first weights twice, with their tensors overwritten in between, and "
        "stop the run unless every tensor is then the same.",
    )
    flags: dict[str, Any] = semantic(
        {}, description="SGLang: further flags of launch_server, without dashes: `{attention-backend: triton}`."
    )
    request_timeout_seconds: float = operational(600.0, gt=0, le=86400, description="Timeout of one request.")
    trust_network: bool = operational(
        False,
        description="Send prompts and token unencrypted to servers of other machines that `AREAL_LLM_SERVER_ADDRS` "
        "names by `http://`.",
    )
    threads: int = operational(0, ge=0, le=1024, description="CPU threads per server; 0 is all cores.")


class Evaluation(Section):
    """Greedy (or sampled) accuracy on the held-out split."""

    every: int = semantic(
        0,
        ge=0,
        le=1_000_000,
        description="Iterations between evaluations, besides the first and last; 0: never.",
        live=True,
    )
    limit: int = semantic(0, ge=0, le=10**9, description="Rows of the held-out split; 0 is all.")
    samples: int = semantic(1, ge=1, le=1024, description="Completions per prompt; more than one needs a temperature.")
    temperature: float = semantic(0.0, ge=0, le=10, description="0 is greedy.")
    max_new_tokens: int = semantic(256, ge=1, le=131072, description="Longest completion, in tokens.")
    stop: list[str] = semantic([], description="Strings that end a completion.")
    group_seconds: float = operational(
        3600.0,
        gt=0,
        le=864_000,
        description="Time limit of one attempt at a prompt in seconds, waits for servers included.",
    )


class StoreSettings(Section):
    """Where tables, weights and checkpoints are stored."""

    url: str = operational(
        "", description="A folder, `file://…` or `s3://bucket/prefix`; empty: AREALFLOW_STORE, else `.arealflow/store`."
    )
    compact_every: int = operational(
        64,
        ge=0,
        le=1_000_000,
        description="Iterations between compactions, which keep queries of long runs fast; 0: never.",
    )


class Schedule(Section):
    """How long the run is."""

    iterations: int = semantic(
        100, ge=1, le=10_000_000, description="Iterations of the run; a learning-rate decay ends with the last."
    )
    artifact_every: int = operational(
        10, ge=1, le=1_000_000, description="Iterations between rollout artifacts in the UI."
    )


class Alerts(Section):
    """Thresholds of warnings, which go to the log and, as Prefect events, to automations. 0 turns a warning off."""

    reward_drop: float = operational(
        0.5, ge=0, le=100, description="Drop of the mean reward below the best so far, as a share of the latter."
    )
    window: int = operational(5, ge=1, le=10_000, description="Iterations over which this mean is taken.")
    max_kl: float = operational(
        1.0, ge=0, le=1e6, description="KL per token, in nats, to version 0 or to the policy before the step."
    )
    max_unverified: float = operational(
        0.05, ge=0, le=1, description="Share of `timeout` and `error` verdicts; `reward.max_unverified` stops the run."
    )
    max_logprob_gap: float = operational(
        0.05, ge=0, le=100, description="Train-inference mismatch, in nats; `algorithm.max_logprob_gap` stops the run."
    )
    min_effective_sample_size: float = operational(
        0.5,
        ge=0,
        le=1,
        description="Least effective sample size of the behaviour weights with η > 0, as a share of the tokens.",
    )
    max_behaviour_clipped: float = operational(
        0.1, ge=0, le=1, description="Share of tokens whose behaviour weight is capped or masked with η > 0."
    )
    max_lag_beyond: float = operational(
        4.0, ge=0, le=1e6, description="Versions by which a token's lag may exceed η with `rollout.bound: admission`."
    )
