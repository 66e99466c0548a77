"""The sections of a recipe, shared by the flows."""

from __future__ import annotations

from typing import Any, Literal

from schemas.recipe.derived import Interruption
from schemas.recipe.fields import Section, operational, section, semantic
from schemas.recipe.filters import Filters


class ScratchModel(Section):
    """A small character-level Llama made from nothing: no download, for the quickstart and for tests."""

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
    scratch: ScratchModel | None = semantic(None, description="Make a small character-level model instead.")
    warm_start: str = semantic(
        "", description="An SFT recipe to run first (`NAME-sft`); its last weights are version 0."
    )
    max_length: int = semantic(1024, ge=8, le=1_048_576, description="Tokens a sample may have, prompt included.")
    dtype: Literal["float32", "bfloat16"] = semantic("float32", description="Precision of the forward pass.")


class Data(Section):
    """The prompts and their answers."""

    source: str = semantic(
        description="Data-set name, JSONL/Parquet path (also from the recipe's folder) or URL, `{split}` replaced; or `sums://TERMS`.",
    )
    subset: str = semantic("", description="Configuration name of a Hugging Face data set.")
    train_split: str = semantic("train", min_length=1, description="Split that is trained on.")
    eval_split: str = semantic("test", min_length=1, description="Held-out split that `evaluate` reads.")
    prompt_column: str = semantic("question", min_length=1, description="Column with the prompt.")
    answer_column: str = semantic("answer", min_length=1, description="Column with the reference answer.")
    template: str = semantic("{prompt}", description="How a row becomes the user's message; must contain `{prompt}`.")
    system: str = semantic("", description="System message; needs `chat`.")
    chat: bool = semantic(False, description="Apply the tokenizer's chat template.")
    on_long_prompt: Literal["error", "drop"] = semantic(
        "error", description="A prompt that leaves no room ends the run, or is left out and counted."
    )
    limit: int = semantic(0, ge=0, le=10**9, description="Use only the first rows of each split; 0 is all.")


class Rollout(Section):
    """How completions are sampled for training: from the whole vocabulary, since a trainer can reproduce only that."""

    groups: int = semantic(32, ge=1, le=65536, description="Prompts per iteration.")
    group_size: int = semantic(8, ge=1, le=1024, description="Completions per prompt.")
    max_new_tokens: int = semantic(256, ge=1, le=131072, description="Longest completion, in tokens.")
    temperature: float = semantic(1.0, ge=1e-3, le=10, description="Softmax temperature; logprobs are taken at it too.")
    stop: list[str] = semantic([], description="Strings that end a completion (kept in it).")
    max_head_offpolicyness: int = semantic(
        0,
        before=0,
        ge=0,
        le=1024,
        description="η: how many versions the newest weights may be ahead of those with which a sample began. "
        "0 is synchronous: every sample is of the weights that train on it.",
    )
    bound: Literal["strict", "admission"] = semantic(
        "strict",
        before="strict",
        description="`strict`: η is never exceeded. `admission`: only the number of groups that begin is bounded, "
        "as in AReaL; slow groups may exceed η, and training waits for none.",
    )
    interruption: Interruption | None = semantic(
        None,
        before=None,
        description="What new weights do to samples under way. `in_place`: they continue with the KV cache of older "
        "weights, and their tokens are marked. `abort`: their cache is computed again. `drain`: weights wait for their "
        "end. None: `in_place`.",
    )
    pace: int | None = operational(
        None, ge=0, description="Groups that may begin beyond what the next iteration takes; none: as many as η allows."
    )
    workers: int = operational(
        1,
        ge=1,
        le=256,
        description="Rollout workers: processes that run the workflow of the groups. One keeps many servers busy; more "
        "are for workflows that compute themselves.",
    )
    groups_in_memory: int = operational(
        1024,
        ge=0,
        le=1_000_000,
        description="Finished groups that wait in a worker's memory; with more, they are written to the store at once.",
    )
    flush_seconds: float = operational(
        30.0,
        ge=0,
        le=86400,
        description="A finished group that no iteration has taken after this time is written to the store.",
    )
    group_seconds: float = operational(
        3600.0,
        gt=0,
        le=864000,
        description="Time limit of one attempt at a group, waits for servers included.",
    )
    group_attempts: int = operational(
        3, ge=1, le=1000, description="Attempts at a group that fails, after which it is rejected."
    )
    max_failed_groups: int = operational(
        32,
        ge=0,
        le=1_000_000,
        description="Groups that may fail for good in a start of the flow; more end the run.",
    )
    filters: Filters = section(Filters, "Dynamic sampling: which finished groups are not trained on.")


class Workflow(Section):
    """How one group of samples is produced."""

    name: str = semantic(
        "single_turn",
        description="`single_turn`, or your own as `package.module:object`. The groups of a rollout worker share an "
        "event loop: a call that blocks delays the others there, so use `await asyncio.to_thread(...)` for it.",
    )
    arguments: dict[str, Any] = semantic({}, description="Keyword arguments of your own workflow.")
    blocked_seconds: float = operational(
        60.0,
        gt=0,
        le=86400,
        description="A call that blocks the event loop of a rollout worker's groups for longer costs its group the "
        "attempt; the other groups there begin again.",
    )


class Reward(Section):
    """How a completion is judged, in processes that can be killed."""

    verifier: str = semantic("math", description="`math`, `exact`, or your own as `package.module:object`.")
    arguments: dict[str, Any] = semantic({}, description="Keyword arguments of the verifier.")
    unparseable_reward: float = semantic(
        0.0, ge=-1e3, le=1e3, description="Reward where no answer can be found in the text."
    )
    timeout_reward: float | None = semantic(
        0.0,
        before=None,
        ge=-1e3,
        le=1e3,
        description="Reward of a `timeout` verdict; null: it is treated as an `error`.",
    )
    on_unverified: Literal["drop_sample", "drop_group", "reward"] = semantic(
        "drop_sample", description="What becomes of a sample with an `error` verdict."
    )
    unverified_reward: float = semantic(
        0.0, ge=-1e3, le=1e3, description="The reward when `on_unverified` is `reward`."
    )
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
        description="Seconds after which a verifier that waits is ended, an `error`; 0: 60 times `timeout_seconds`.",
    )
    memory_mb: int = semantic(
        2048, ge=128, le=1_048_576, description="Address space a verifier may use beyond its start."
    )
    workers: int = operational(2, ge=1, le=256, description="Verifier processes.")


class Grpo(Section):
    """Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300, §4.1).

    `reward_norm: mean_std` is GRPO's own. `mean_batch_std` (Lite PPO, arXiv:2508.08221; TRL's `scale_rewards="batch"`)
    is recommended where many groups are nearly all right or all wrong: division by a group's own small deviation makes
    those count most. Either gives groups of equal rewards no advantage at all; `advantage_norm: batch` gives them one,
    and is not recommended.
    """

    reward_norm: Literal["mean_std", "mean_batch_std", "mean", "none"] = semantic(
        "mean_std",
        description="Reward minus its group's mean, over the standard deviation of its group (GRPO) or of the batch "
        "(groups that are nearly all right or all wrong do not outweigh others); or less of it.",
    )
    advantage_norm: Literal["none", "group", "batch"] = semantic(
        "none",
        description="Whiten the advantages over the generated tokens of the group or the batch. It centres them again: "
        "with `batch`, groups without signal get an advantage; `reward_norm: mean_batch_std` scales by the batch only.",
    )
    std_unbiased: bool = semantic(
        True,
        before=False,
        description="Divide by the sample's standard deviation (÷ n-1), as TRL, verl and AReaL do; else by the "
        "population's (÷ n), which is smaller: at `group_size` 2 advantages are then 1.41 times as large.",
    )
    clip_ratio: float = semantic(0.2, gt=0, lt=1, description="PPO's ε: the ratio is clipped to [1-ε, 1+ε].")
    kl: Literal["none", "reward", "loss"] = semantic(
        "none",
        description="KL to version 0: in the reward (k1, per token) or in the loss (k3). In the reward it costs a "
        "further forward pass where engines differ in rounding: both logprobs are then the trainer's.",
    )
    kl_coef: float = semantic(0.0, ge=0, le=100, description="Weight of the KL term.")
    loss: Literal["token_mean", "sequence_mean"] = semantic(
        "token_mean", description="Mean over all tokens, or over sequences of their token means."
    )
    decoupled: bool = semantic(
        True,
        before=True,
        description="Decoupled PPO, where η > 0 or server and trainer are not both on the CPU in float32: the clip "
        "keeps close to the policy of the iteration's start, and a weight corrects for the one that has sampled. "
        "`false`: plain PPO, which clips the ratio to the policy that has sampled.",
    )
    behaviour_bound: Literal["cap", "mask"] = semantic(
        "cap",
        before="cap",
        description="How the behaviour weight π_proximal/π_behaviour is bounded. `cap`: at most `behaviour_cap` "
        "(truncated importance sampling). `mask`: 0, and no gradient, outside `behaviour_low` and `behaviour_high` "
        "(IcePop).",
    )
    behaviour_cap: float = semantic(
        2.0,
        ge=1,
        le=1e6,
        description="Cap of the behaviour weight; with η = 0 the weight is 1 with both on the CPU in float32.",
    )
    behaviour_low: float = semantic(0.5, before=0.5, ge=0, le=1, description="Least behaviour weight that counts.")
    behaviour_high: float = semantic(
        5.0, before=5.0, ge=1, le=1e6, description="Greatest behaviour weight that counts."
    )
    behaviour_level: Literal["token", "sequence"] = semantic(
        "token",
        before="token",
        description="Whose weight is bounded and applied: each token's, or the product over the generated tokens of "
        "its sample, which costs a further forward pass with one minibatch.",
    )
    max_log_ratio: float = semantic(
        20.0,
        before=0.0,
        ge=0,
        le=80,
        description="Bound of the log-ratio of two policies, in nats, so that no ratio overflows (`clamped` counts the "
        "tokens above); 0: none.",
    )
    max_logprob_gap: float = operational(
        0.1,
        gt=0,
        le=100,
        description="Mean distance of a token's logprobs in engine and trainer, in nats, above which the run stops.",
    )
    minibatches: int = semantic(
        1, ge=1, le=1024, description="Optimizer steps per iteration; divides groups · group_size."
    )


class Sft(Section):
    """Supervised fine-tuning on the data set's answers."""

    batch_size: int = semantic(64, ge=1, le=65536, description="Demonstrations per optimizer step.")
    steps: int = semantic(25, ge=1, le=100_000, description="Optimizer steps per iteration (between commits).")


class Trainer(Section):
    """AdamW and how its batches are laid out."""

    backend: Literal["local", "fsdp2", "deepspeed"] = semantic("local", description="Training engine.")
    lr: float = semantic(1e-6, gt=0, le=1, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = semantic("constant", description="Decay after the warm-up.")
    lr_final: float = semantic(1.0, ge=0, le=1, description="Learning rate at the end, as a share of `lr`.")
    warmup_steps: int = semantic(0, ge=0, le=1_000_000, description="Optimizer steps of linear warm-up.")
    beta1: float = semantic(0.9, ge=0, lt=1, description="AdamW's β₁.")
    beta2: float = semantic(0.999, ge=0, lt=1, description="AdamW's β₂.")
    eps: float = semantic(1e-8, ge=1e-20, le=1e-2, description="AdamW's ε.")  # less is 0 beside float32's squares
    weight_decay: float = semantic(0.0, ge=0, le=1, description="AdamW's decoupled weight decay.")
    decay_norms_and_biases: bool = semantic(
        False, before=True, description="Decay norms and biases too, not only matrices and embeddings."
    )
    max_grad_norm: float = semantic(1.0, gt=0, le=1e6, description="Gradients are scaled down to this norm.")
    max_skipped_steps: int = semantic(
        3, ge=0, le=10_000, description="Optimizer steps in a row that a non-finite loss or gradient may skip."
    )
    micro_batch_tokens: int = semantic(16384, ge=16, le=16_777_216, description="Token budget of one forward pass.")
    layout: Literal["packed", "padded"] = semantic(
        "padded", description="Sequences end to end, or padded to one length."
    )
    recover_within_seconds: float = operational(
        60.0, gt=0, le=86400, description="Checkpoint so often that re-training after a crash takes no longer."
    )
    threads: int = operational(0, ge=0, le=1024, description="CPU threads of a rank; 0 is all cores.")
    ranks: int = operational(
        1, ge=1, le=4096, description="Processes that share the training, one GPU each where there are GPUs."
    )
    gpus: list[int] = operational([], description="GPUs of the ranks, by number; empty: the first ones.")
    zero_stage: Literal[0, 1, 2, 3] = operational(
        2, description="DeepSpeed: what is split over the ranks: 1 optimizer, 2 gradients too, 3 weights too."
    )
    cpu_offload: bool = operational(False, description="Keep optimizer state in host memory: slower, saves GPU memory.")
    gradient_checkpointing: bool = operational(
        False, description="Recompute activations in the backward pass: a third slower, saves GPU memory."
    )
    compile: bool = operational(False, description="Compile the layers with torch.compile: a minute's start, faster.")
    head_chunk_tokens: int = operational(
        4096, ge=16, le=1_048_576, description="Tokens whose logits over the vocabulary are in memory at once."
    )
    weights_every: int = operational(
        1,
        ge=1,
        le=1_000_000,
        description="Versions between weights written to the store; the others are handed to the servers only. "
        "Where these get weights through the store only, every version is written.",
    )


class Inference(Section):
    """The servers that generate."""

    engine: Literal["embedded", "sglang"] = semantic("embedded", description="Inference engine.")
    deterministic: bool = semantic(True, description="Embedded: bits do not depend on what else is in the batch.")
    servers: int = operational(1, ge=1, le=1024, description="Number of servers.")
    slots: int = semantic(64, ge=4, le=4096, description="Embedded: sequences decoded together.")
    groups_per_request: int = operational(1, ge=1, le=1024, description="Groups sent in one HTTP request.")
    max_concurrent_requests: int = operational(
        64, ge=1, le=65536, description="Requests under way at once, per server."
    )
    tensor_parallel: int = operational(1, ge=1, le=64, description="SGLang: GPUs that share one server's model.")
    gpus: list[int] = operational(
        [],
        description="GPUs of the servers, by number; empty: those after the trainer's, or the same if there are none.",
    )
    memory_fraction: float = operational(
        0.0,
        ge=0,
        lt=1,
        description="SGLang: share of a GPU's memory for weights and cache; 0: its choice, or a part of a shared GPU.",
    )
    first_port: int = operational(
        0, ge=0, le=65535, description="SGLang: server i listens on this port + i; 0: any free ports."
    )
    transport: Literal["auto", "store", "tensor", "nccl"] = operational(
        "auto",
        description="How new weights reach the servers: through the store, as tensors on a shared GPU, between GPUs "
        "by NCCL; auto takes the fastest that the placement allows.",
    )
    release_memory: bool = operational(
        False, description="SGLang: give the GPU's memory back while the trainer works (both on the same GPU)."
    )
    prove_weights: bool = operational(
        True,
        description="SGLang: give the servers the first weights twice, with their tensors overwritten in between, and "
        "stop the run unless every tensor comes out the same.",
    )
    flags: dict[str, Any] = semantic(
        {}, description="SGLang: further flags of launch_server, without dashes: `{attention-backend: triton}`."
    )
    request_timeout_seconds: float = operational(600.0, gt=0, le=86400, description="Deadline of one request.")
    threads: int = operational(0, ge=0, le=1024, description="CPU threads per server; 0 is all cores.")


class Evaluation(Section):
    """Greedy (or sampled) accuracy on the held-out split."""

    every: int = semantic(
        0, ge=0, le=1_000_000, description="Iterations between evaluations; first and last always; 0: never."
    )
    limit: int = semantic(0, ge=0, le=10**9, description="Rows of the held-out split; 0 is all.")
    samples: int = semantic(1, ge=1, le=1024, description="Completions per prompt; more than one needs a temperature.")
    temperature: float = semantic(0.0, ge=0, le=10, description="0 is greedy.")
    max_new_tokens: int = semantic(256, ge=1, le=131072, description="Longest completion, in tokens.")
    stop: list[str] = semantic([], description="Strings that end a completion.")
    group_seconds: float = operational(
        3600.0, gt=0, le=864_000, description="An evaluation fails when none of its prompts is done for so long."
    )


class StoreSettings(Section):
    """Where tables, weights and checkpoints lie."""

    url: str = operational(
        "", description="A folder, `file://…` or `s3://bucket/prefix`; empty: AREALFLOW_STORE, else `.arealflow/store`."
    )
    compact_every: int = operational(
        64,
        ge=0,
        le=1_000_000,
        description="Iterations between compactions, which keep queries of long runs fast; 0: never.",
    )


class Launcher(Section):
    """Where services run."""

    type: Literal["local", "inline"] = operational(
        "local", description="`local`: processes of this machine; `inline`: threads of this process, for a debugger."
    )
    startup_seconds: float = operational(180.0, gt=0, le=86400, description="A service must be ready within this time.")
    restarts: int = operational(
        3,
        ge=0,
        le=1000,
        description="Restarts of a failed service, without a commit between, before the run stops; one of several "
        "inference servers is left out instead.",
    )
    warn_seconds: float = operational(
        60.0,
        gt=0,
        le=86400,
        description="The log names what makes no progress for this long; then at doubled intervals.",
    )
    hang_seconds: float = operational(
        600.0, gt=0, le=86400, description="A service that makes no progress for this long is ended and started again."
    )


class Schedule(Section):
    """How long the run is."""

    iterations: int = semantic(
        100, ge=1, le=10_000_000, description="Iterations; a learning-rate decay ends with them."
    )
    artifact_every: int = operational(
        10, ge=1, le=1_000_000, description="Iterations between rollout artifacts in the UI."
    )


class Alerts(Section):
    """When a run warns: in its log, and by Prefect events that automations send on. 0 turns a warning off."""

    reward_drop: float = operational(
        0.5, ge=0, le=100, description="Fall of the mean reward below the best so far, as a share of that: a collapse."
    )
    window: int = operational(5, ge=1, le=10_000, description="Iterations whose rewards make such a mean.")
    max_kl: float = operational(
        1.0,
        ge=0,
        le=1e6,
        description="KL per token, in nats, to version 0 or to the policy before the step: too large.",
    )
    max_unverified: float = operational(
        0.05, ge=0, le=1, description="Share of `timeout` and `error` verdicts; `reward.max_unverified` stops the run."
    )
    max_logprob_gap: float = operational(
        0.05,
        ge=0,
        le=100,
        description="Mean distance of engine and trainer, in nats; `algorithm.max_logprob_gap` stops the run.",
    )
    min_effective_sample_size: float = operational(
        0.5,
        ge=0,
        le=1,
        description="Effective sample size of the behaviour weights with η > 0, as a share of the tokens: too small.",
    )
    max_behaviour_clipped: float = operational(
        0.1, ge=0, le=1, description="Share of tokens whose behaviour weight is capped or masked with η > 0: too large."
    )
    max_lag_beyond: float = operational(
        4.0,
        ge=0,
        le=1e6,
        description="Versions by which a token's lag exceeds η with `rollout.bound: admission`: too many.",
    )
