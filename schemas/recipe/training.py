"""The sections `algorithm` and `trainer` of a recipe."""

from __future__ import annotations

from typing import Literal

from schemas.recipe.fields import Section, operational, semantic


class Grpo(Section):
    """Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300, §4.1).

    `reward_norm: mean_std` is GRPO's own. `mean_batch_std` (Lite PPO, arXiv:2508.08221; TRL's `scale_rewards="batch"`)
    is recommended if many groups are nearly all right or all wrong: division by a group's own small deviation makes
    those count most. Both give zero-variance groups (equal rewards) advantage 0; `advantage_norm: batch` does not, and
    is not recommended.
    """

    reward_norm: Literal["mean_std", "mean_batch_std", "mean", "none"] = semantic(
        "mean_std",
        description="Reward minus its group's mean, over the standard deviation of its group (GRPO) or of the batch "
        "(groups that are nearly all right or wrong do not outweigh others). `mean`: not divided; `none`: reward.",
    )
    advantage_norm: Literal["none", "group", "batch"] = semantic(
        "none",
        description="Whiten the advantages over the generated tokens of the group or the batch. This centres them "
        "again: with `batch`, zero-variance groups get an advantage; `reward_norm: mean_batch_std` only scales.",
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
        description="KL to version 0: in the reward (k1, per token) or in the loss (k3). In the reward it needs "
        "another forward pass if engines differ in rounding, so that both logprobs are the trainer's.",
    )
    kl_coef: float = semantic(0.0, ge=0, le=100, description="Weight of the KL term.")
    loss: Literal["token_mean", "sequence_mean"] = semantic(
        "token_mean", description="Mean over all tokens, or over sequences of their token means."
    )
    decoupled: bool = semantic(
        True,
        before=True,
        description="Decoupled PPO, if η > 0 or server and trainer are not both on the CPU in float32: clips the ratio "
        "to the policy of the iteration's start (proximal), with a weight that corrects for the sampling policy "
        "(behaviour). `false`: plain PPO, which clips the ratio to the behaviour policy.",
    )
    tis_bound: Literal["cap", "mask"] = semantic(
        "cap",
        before="cap",
        renamed_from="behaviour_bound",
        description="How the behaviour weight π_proximal/π_behaviour is bounded. `cap`: at most `tis_cap` "
        "(truncated importance sampling). `mask`: 0 outside `tis_low` and `tis_high` (IcePop), so no policy gradient; "
        "the KL term of `kl: loss` is not masked.",
    )
    tis_cap: float = semantic(
        2.0,
        renamed_from="behaviour_cap",
        ge=1,
        le=1e6,
        description="Cap of the behaviour weight, which is 1 with η = 0 and server and trainer on the CPU in float32.",
    )
    tis_low: float = semantic(
        0.5, before=0.5, renamed_from="behaviour_low", ge=0, le=1, description="Smallest behaviour weight not masked."
    )
    tis_high: float = semantic(
        5.0, before=5.0, renamed_from="behaviour_high", ge=1, le=1e6, description="Largest behaviour weight not masked."
    )
    tis_level: Literal["token", "sequence"] = semantic(
        "token",
        before="token",
        renamed_from="behaviour_level",
        description="The weight that is bounded and applied: each token's own, or the product over the generated "
        "tokens of its sample, which needs another forward pass if there is one minibatch.",
    )
    max_log_ratio: float = semantic(
        20.0,
        before=0.0,
        ge=0,
        le=80,
        description="Bound of the log-ratio of two policies, in nats, so that no ratio overflows (the metric `clamped` "
        "counts tokens above it); 0: none.",
    )
    max_logprob_gap: float = operational(
        0.1,
        gt=0,
        le=100,
        description="Train-inference mismatch (mean difference of a token's logprobs in server and trainer, in nats) "
        "above which the run stops.",
        live=True,
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
    eps: float = semantic(1e-8, ge=1e-20, le=1e-2, description="AdamW's ε.")  # less vanishes in float32
    weight_decay: float = semantic(0.0, ge=0, le=1, description="AdamW's decoupled weight decay.")
    decay_norms_and_biases: bool = semantic(
        False, before=True, description="Decay norms and biases too, not only matrices and embeddings."
    )
    max_grad_norm: float = semantic(1.0, gt=0, le=1e6, description="Gradients are scaled down to this norm.")
    max_skipped_steps: int = semantic(
        3, ge=0, le=10_000, description="Consecutive optimizer steps that a non-finite loss or gradient may skip."
    )
    micro_batch_tokens: int = semantic(16384, ge=16, le=16_777_216, description="Token budget of one forward pass.")
    layout: Literal["packed", "padded"] = semantic(
        "padded", description="Sequences end to end, or padded to one length."
    )
    recover_within_seconds: float = operational(
        60.0,
        gt=0,
        le=86400,
        description="Training after which a checkpoint is due: about the longest time to retrain after a crash.",
        live=True,
    )
    threads: int = operational(0, ge=0, le=1024, description="CPU threads of a rank; 0 is all cores.")
    ranks: int = operational(
        1, ge=1, le=4096, description="Trainer processes, one GPU each if there are GPUs.", live=True
    )
    nodes: int = operational(
        1, ge=1, le=512, description="Machines of the ranks, each with the same number of them.", live=True
    )
    replicas: int = operational(
        1,
        ge=1,
        le=4096,
        description="FSDP2: copies of weights and optimizer, each split over an equal part of the ranks (HSDP). With "
        "as many as `nodes`, each machine has a whole copy, and only gradients travel between machines.",
    )
    gpus: list[int] = operational([], description="GPUs of the ranks, by number; empty: the first ones.")
    zero_stage: Literal[0, 1, 2, 3] = operational(
        2,
        description="DeepSpeed: what is sharded over the ranks: 0 nothing (then without DeepSpeed), 1 optimizer, "
        "2 gradients too, 3 weights too.",
    )
    cpu_offload: bool = operational(False, description="Keep optimizer state in host memory: slower, saves GPU memory.")
    gradient_checkpointing: bool = operational(
        False, description="Recompute activations in the backward pass: a third slower, saves GPU memory."
    )
    compile: bool = operational(False, description="Compile layers by torch.compile: a minute's start, then faster.")
    head_chunk_tokens: int = operational(
        4096, ge=16, le=1_048_576, description="Tokens whose logits over the vocabulary are in memory at once."
    )
    weights_every: int = operational(
        1,
        ge=1,
        le=1_000_000,
        description="Versions between weights written to the store; the others are only sent to the servers. Where "
        "servers get weights only through the store, every version is written.",
        live=True,
    )
