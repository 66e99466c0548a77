"""Arrow schemas of every table that a stage writes (one row per sample unless noted otherwise).

Index convention: `logprobs`, `versions`, `stale_kv`, `loss_mask`, `ref_logprobs`, `prox_logprobs` and `advantages`
share the length of `input_ids`; element *i* describes token *i* of `input_ids`. Prompt positions hold 0 (version -1,
mask False).
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

TOKENS: Final = pa.list_(pa.int32())
FLOATS: Final = pa.list_(pa.float32())
MASK: Final = pa.list_(pa.bool_())

VERDICTS: Final = ("correct", "incorrect", "unparseable", "timeout", "error")


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


PROMPTS: Final = _schema(  # one row per data-set row
    ("prompt_id", pa.int64()),
    ("prompt", pa.string()),
    ("answer", pa.string()),
    ("input_ids", TOKENS),
    ("num_tokens", pa.int32()),
)

ROLLOUT: Final = _schema(
    ("sample_id", pa.string()),  # "<group_id>-<sample_index>"
    ("group_id", pa.int64()),  # prompt position in the run: epoch · rows + position
    ("sample_index", pa.int32()),
    ("prompt_id", pa.int64()),
    ("epoch", pa.int32()),
    ("prompt", pa.string()),
    ("completion", pa.string()),
    ("answer", pa.string()),
    ("input_ids", TOKENS),
    ("loss_mask", MASK),
    ("logprobs", FLOATS),
    ("versions", TOKENS),
    ("stale_kv", MASK),  # sampled with a KV cache that weights older than the token's version computed in part
    ("num_tokens", pa.int32()),
    ("num_generated", pa.int32()),
    ("stop_reason", pa.string()),
    ("truncated", pa.bool_()),
    ("turns", pa.int32()),
    ("seed", pa.int64()),
    ("server", pa.string()),
    ("version_min", pa.int32()),
    ("version_max", pa.int32()),
    ("seconds", pa.float32()),
    ("status", pa.string()),
)

VERIFY: Final = _schema(
    ("sample_id", pa.string()),
    ("reward", pa.float32()),
    ("verdict", pa.string()),  # one of VERDICTS
    ("parsed", pa.string()),
    ("detail", pa.string()),
    ("verifier", pa.string()),
    ("verify_seconds", pa.float32()),
)

JUDGED: Final = pa.schema(  # verdicts of a rollout's samples, made for filters or for a workflow that asks for them
    [
        *(ROLLOUT.field(name) for name in ("group_id", "sample_index")),
        *VERIFY,
        pa.field("judged_with", pa.string(), nullable=False),  # digest of the verdict's inputs besides the sample
    ]
)

REFERENCE: Final = _schema(("sample_id", pa.string()), ("ref_logprobs", FLOATS))

PROXIMAL: Final = _schema(("sample_id", pa.string()), ("prox_logprobs", FLOATS))

ADVANTAGE: Final = _schema(
    ("sample_id", pa.string()),
    ("advantages", FLOATS),
    ("returns", FLOATS),
    ("shaped_reward", pa.float32()),
    ("kept", pa.bool_()),
    ("dropped_reason", pa.string()),  # "" when kept
)

_STEPS: Final = _schema(  # one row per optimizer step
    ("version", pa.int32()),  # the version that this step contributes to
    ("step", pa.int32()),  # optimizer steps since version 0, this one included
    ("minibatch", pa.int32()),
    ("loss", pa.float64()),
    ("policy_loss", pa.float64()),
    ("kl", pa.float64()),  # policy against reference, k3, token mean; 0 without a KL term
    ("approx_kl", pa.float64()),  # new against behaviour policy, k3, token mean
    ("entropy", pa.float64()),
    ("clip_fraction", pa.float64()),
    ("ratio_mean", pa.float64()),  # of new against proximal policy: what the clip sees
    ("ratio_max", pa.float64()),
    ("clamped", pa.int64()),  # tokens with a log-ratio above algorithm.max_log_ratio
    # Agreement of trainer and server: proximal policy (of the iteration's start, by the trainer) against behaviour.
    # NaN where it is not measured: in SFT, without tokens, and, where server and trainer run the same code on the CPU,
    # from the second minibatch on, when the policy has changed and no proximal logprobs are kept.
    # With η > 0, over tokens that the trainer's own version sampled with its own KV cache; NaN with fewer than 256.
    ("logprob_gap_mean", pa.float64()),  # |Δ logprob| in nats, token mean
    ("logprob_gap_max", pa.float64()),
    ("ratio_outside", pa.float64()),  # share of tokens whose ratio proximal / behaviour is not within [0.9, 1.1]
    ("grad_norm", pa.float64()),
    ("lr", pa.float64()),
    ("tokens", pa.int64()),  # positions in the loss
    ("total_tokens", pa.int64()),  # positions that the model computed, without padding
    ("samples", pa.int32()),
    ("micro_batches", pa.int32()),
    ("skipped", pa.bool_()),  # loss or gradient was not finite: no step was made
    ("step_seconds", pa.float32()),
)

#: `peak_bytes`: of each rank, the most GPU memory that tensors took during the step; on the CPU, the most memory that
#: its process has ever had. Null in tables of earlier versions.
TRAIN_STEPS: Final = pa.schema([*_STEPS, pa.field("peak_bytes", pa.list_(pa.int64()))])

TRAIN_SAMPLES: Final = _schema(
    ("sample_id", pa.string()),
    ("minibatch", pa.int32()),
    ("micro_batch", pa.int32()),
    ("sample_ratio", pa.float32()),
    ("sample_clip_fraction", pa.float32()),
    ("sample_kl", pa.float32()),
    ("sample_loss", pa.float32()),
    ("sample_logprob_gap", pa.float32()),  # mean over its tokens; NaN where `logprob_gap_mean` is
)

#: The beginnings of some completions, which servers score once they hold `version`: the weights that the iteration has
#: made. Empty where enough tokens of the iteration measured the agreement of trainer and server.
SCORED: Final = _schema(
    ("sample_id", pa.string()),
    ("version", pa.int32()),
    ("input_ids", TOKENS),  # up to the last token that is scored
    ("scored_from", pa.int32()),  # position of the first
    ("scores", FLOATS),  # the trainer's logprobs of these, at temperature 1
)

PUBLISH: Final = _schema(  # one row per publication
    ("version", pa.int32()),
    ("weights_attempt", pa.string()),
    ("transport", pa.string()),
    ("materialised", pa.bool_()),
    ("uri", pa.string()),
    ("bytes", pa.int64()),
    ("sha256", pa.string()),
    ("write_seconds", pa.float32()),  # until servers could load them
    ("load_seconds", FLOATS),  # one element per server
)

EVALUATE: Final = pa.schema(
    [*ROLLOUT, *[f for f in VERIFY if f.name != "sample_id"], pa.field("weights_version", pa.int32(), nullable=False)]
)

SFT_BATCH: Final = _schema(  # the demonstrations that one SFT iteration trains on
    ("sample_id", pa.string()),
    ("prompt_id", pa.int64()),
    ("epoch", pa.int32()),
    ("prompt", pa.string()),
    ("completion", pa.string()),
    ("input_ids", TOKENS),
    ("loss_mask", MASK),
    ("num_tokens", pa.int32()),
    ("minibatch", pa.int32()),
)

TEXTS: Final = frozenset({"prompt", "completion", "answer", "parsed", "detail"})

#: List columns that tables of earlier versions lack: read as all False, as long as the named column, or as null.
LATER: Final = {"stale_kv": "versions", "peak_bytes": None}

#: Short texts with few distinct values.
REPEATED: Final = frozenset(
    {"stop_reason", "server", "status", "verdict", "verifier", "judged_with", "dropped_reason", "transport"}
)


def scalar_fields(*schemas: pa.Schema) -> list[pa.Field]:
    """The columns of `schemas` that are neither lists nor texts, each name once."""
    found = {f.name: f for s in schemas for f in s if not pa.types.is_list(f.type) and f.name not in TEXTS}
    return list(found.values())


#: The pre-joined table of scalars that most queries read, written at each commit.
SCALARS: Final = pa.schema(
    [pa.field("iteration", pa.int32(), nullable=False), *scalar_fields(ROLLOUT, VERIFY, ADVANTAGE, TRAIN_SAMPLES)]
)

TABLES: Final[dict[str, pa.Schema]] = {
    "initial_weights": PUBLISH,
    "prompts": PROMPTS,
    "eval_prompts": PROMPTS,
    "rollout": ROLLOUT,
    "judged": JUDGED,
    "verify": VERIFY,
    "reference": REFERENCE,
    "proximal": PROXIMAL,
    "advantage": ADVANTAGE,
    "train_steps": TRAIN_STEPS,
    "train_samples": TRAIN_SAMPLES,
    "scored": SCORED,
    "publish": PUBLISH,
    "evaluate": EVALUATE,
    "batch": SFT_BATCH,
    "scalars": SCALARS,
}

#: Columns that differ between two runs of the same computation: excluded from content digests.
VOLATILE: Final = frozenset(
    {
        *("server", "seconds", "verify_seconds", "step_seconds", "write_seconds", "load_seconds", "weights_attempt"),
        *("uri", "peak_bytes"),
    }
)
