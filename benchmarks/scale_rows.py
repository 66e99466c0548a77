"""Rows of a made-up but realistic run: GSM8K's size of prompts and groups, lengths, rewards and failures that drift.

What matters to a compressor and to a query is kept: prompts repeat by epoch and have difficulties, lengths are
log-normal and cut off at a limit, rewards follow difficulty and progress, ratios stay near 1 with rare outliers,
most tokens are nearly certain, token ids follow a Zipf law, a group shares its prompt. Everything derives from the
iteration's number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.tables import ADVANTAGE, PUBLISH, ROLLOUT, SCALARS, TABLES, TRAIN_STEPS, VERIFY

GROUP = 8
PROMPTS = 7473
SERVERS = [f"http://10.0.0.{i}:30000" for i in range(8)]
LIMIT = 1024  # tokens a completion may have
MINIBATCHES = 4
VOCABULARY = 49152
_EASE = np.random.default_rng(0).beta(1.2, 1.6, PROMPTS)
_LENGTH = np.random.default_rng(1).normal(5.2, 0.35, PROMPTS)
_PROMPT_TOKENS = np.random.default_rng(2).integers(60, 260, PROMPTS).astype(np.int32)
_SHUFFLE = np.random.default_rng(3).permutation(PROMPTS)

Columns = dict[str, Any]


def scalar_columns(k: int, samples: int) -> Columns:
    """Every short column of an iteration's samples."""
    rng = np.random.default_rng([7, k])
    group = np.repeat(np.arange(k * samples // GROUP, (k + 1) * samples // GROUP), GROUP)
    prompt = _SHUFFLE[group % PROMPTS]
    progress = 1 - np.exp(-k / 3000)
    wanted = np.exp(rng.normal(_LENGTH[prompt] + 0.3 * progress, 0.45)).astype(np.int32) + 1
    generated = np.minimum(wanted, LIMIT).astype(np.int32)
    rows = _identity(group, prompt, rng) | _generation(k, generated, wanted, _PROMPT_TOKENS[prompt], rng)
    rows |= _verdicts(_EASE[prompt] * (0.35 + 0.65 * progress), wanted >= LIMIT, rng)
    return rows | _advantages(rows) | _training(len(group), rng) | {"iteration": np.full(len(group), k, np.int32)}


def _identity(group: Any, prompt: Any, rng: np.random.Generator) -> Columns:
    index = np.tile(np.arange(GROUP, dtype=np.int32), len(group) // GROUP)
    return {
        "sample_id": [f"{g}-{i}" for g, i in zip(group.tolist(), index.tolist(), strict=True)],
        "group_id": group,
        "sample_index": index,
        "prompt_id": prompt,
        "epoch": (group // PROMPTS).astype(np.int32),
        "seed": rng.integers(0, 1 << 62, len(group)),
        "turns": np.ones(len(group), np.int32),
        "status": np.full(len(group), "finished"),
    }


def _generation(k: int, generated: Any, wanted: Any, prompt_tokens: Any, rng: np.random.Generator) -> Columns:
    """Lengths, servers and versions; a tenth of the samples was begun one or two versions ago."""
    lag = np.minimum(rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], len(generated)) * rng.integers(1, 3, len(generated)), k)
    server = np.repeat(rng.integers(0, len(SERVERS), len(generated) // GROUP), GROUP)
    return {
        "num_generated": generated,
        "num_tokens": generated + prompt_tokens,
        "truncated": wanted >= LIMIT,
        "stop_reason": np.where(wanted >= LIMIT, "length", "stop"),
        "server": np.array(SERVERS)[server],
        "version_min": (k - lag).astype(np.int32),
        "version_max": np.full(len(generated), k, np.int32),
        "seconds": (generated * rng.normal(0.02, 0.002, len(generated))).astype(np.float32),
    }


def _verdicts(chance: Any, truncated: Any, rng: np.random.Generator) -> Columns:
    draw, failure = rng.random(len(chance)), rng.random(len(chance))
    verdict = np.where(draw < chance, "correct", "incorrect").astype("<U12")
    verdict[truncated | (failure < 0.02)] = "unparseable"
    verdict[failure > 0.999] = "timeout"
    reward = (verdict == "correct").astype(np.float32)
    return {
        "verdict": verdict,
        "reward": np.where(verdict == "timeout", np.float32("nan"), reward),
        "verifier": np.full(len(chance), "math"),
        "verify_seconds": rng.exponential(0.004, len(chance)).astype(np.float32),
    }


def _advantages(rows: Columns) -> Columns:
    by_group = rows["reward"].reshape(-1, GROUP)
    known = ~np.isnan(by_group)
    mean = np.nansum(by_group, 1, keepdims=True) / np.maximum(known.sum(1, keepdims=True), 1)
    spread = np.sqrt(np.nansum((by_group - mean) ** 2, 1, keepdims=True) / np.maximum(known.sum(1, keepdims=True), 1))
    shaped = np.where(known, (by_group - mean) / (spread + 1e-6), 0).ravel().astype(np.float32)
    kept = known.ravel()
    return {"shaped_reward": shaped, "kept": kept, "dropped_reason": np.where(kept, "", "timeout")}


def _training(n: int, rng: np.random.Generator) -> Columns:
    outlier = rng.random(n) < 1e-4
    return {
        "minibatch": (np.arange(n) * MINIBATCHES // n).astype(np.int32),
        "micro_batch": (np.arange(n) // 32).astype(np.int32),
        "sample_ratio": np.exp(rng.normal(0, 0.02, n) + outlier * rng.normal(0, 1, n)).astype(np.float32),
        "sample_clip_fraction": np.maximum(rng.normal(0, 0.01, n), 0).astype(np.float32),
        "sample_kl": rng.exponential(4e-4, n).astype(np.float32),
        "sample_loss": rng.normal(0, 0.8, n).astype(np.float32),
        "sample_logprob_gap": rng.exponential(6e-3, n).astype(np.float32),
    }


def token_columns(k: int, rows: Columns) -> Columns:
    """The per-token and text columns of the same samples. A text has a word for each token, of about four letters."""
    rng = np.random.default_rng([11, k])
    sizes, generated = rows["num_tokens"], rows["num_generated"]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mask = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes) >= np.repeat(sizes - generated, sizes)
    ids = (rng.zipf(1.35, offsets[-1]) % VOCABULARY).astype(np.int32)
    for row in range(len(sizes)):  # a group's samples share their prompt
        first, length = offsets[row - row % GROUP], sizes[row] - generated[row]
        ids[offsets[row] : offsets[row] + length] = ids[first : first + length]
    sure = rng.random(offsets[-1]) < 0.55
    logprobs = -np.where(sure, rng.exponential(2e-3, offsets[-1]), rng.exponential(0.9, offsets[-1]))
    advantage = np.repeat(rows["shaped_reward"], sizes)
    texts = [_text(ids[a:b]) for a, b in itertools.pairwise(offsets)]
    cut = (offsets[1:] - offsets[:-1] - generated).tolist()
    return {
        "input_ids": (offsets, ids),
        "loss_mask": (offsets, mask),
        "stale_kv": (offsets, np.zeros_like(mask)),
        "logprobs": (offsets, np.where(mask, logprobs, 0).astype(np.float32)),
        "versions": (offsets, np.where(mask, k, -1).astype(np.int32)),
        "advantages": (offsets, np.where(mask, advantage, 0).astype(np.float32)),
        "returns": (offsets, np.where(mask, advantage, 0).astype(np.float32)),
        "prompt": [" ".join(words[:n]) for words, n in zip(texts, cut, strict=True)],
        "completion": [" ".join(words[n:]) for words, n in zip(texts, cut, strict=True)],
        "answer": [str(prompt % 997) for prompt in rows["prompt_id"].tolist()],
        "parsed": [str(prompt % 997) for prompt in rows["prompt_id"].tolist()],
        "detail": [""] * len(sizes),
    }


_WORDS = np.array([np.base_repr(i * 7919 % 1679616, 36).lower() for i in range(VOCABULARY)], dtype=object)


def _text(ids: Any) -> list[str]:
    return list(_WORDS[ids])


def table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """The columns that the table `name` has."""
    return pa.table([_array(columns[f.name], f.type) for f in TABLES[name]], schema=TABLES[name])


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, tuple):
        offsets, flat = values
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat), type=kind)
    return pa.array(values).cast(kind)


def iteration_tables(k: int, samples: int, with_tokens: bool) -> dict[str, dict[str, pa.Table]]:
    """The tables of each stage. Without tokens, `rollout`, `verify` and `advantage` are empty."""
    rows = scalar_columns(k, samples)
    tokens = rows | token_columns(k, rows) if with_tokens else {}
    made = {schema: table(schema, tokens) if tokens else TABLES[schema].empty_table() for schema in PER_TOKEN}
    train = {"train_steps": _train_steps(k, samples), "train_samples": table("train_samples", rows)}
    return {
        **{name: {name: rows_of} for name, rows_of in made.items()},
        "train": train,
        "publish": {"publish": _publish(k)},
        "scalars": {"scalars": table("scalars", rows)},
    }


PER_TOKEN = ("rollout", "verify", "advantage")


def _train_steps(k: int, samples: int) -> pa.Table:
    rng = np.random.default_rng([13, k])
    rows = [{f.name: _step_value(f, rng) for f in TRAIN_STEPS} for _ in range(MINIBATCHES)]
    known = {"version": k + 1, "samples": samples // MINIBATCHES, "entropy": 0.2 + 0.8 * float(np.exp(-k / 2000))}
    fixed = [known | {"step": k * MINIBATCHES + i + 1, "minibatch": i} for i in range(MINIBATCHES)]
    return pa.Table.from_pylist([row | own for row, own in zip(rows, fixed, strict=True)], schema=TRAIN_STEPS)


def _step_value(field: pa.Field, rng: np.random.Generator) -> Any:
    if pa.types.is_list(field.type):  # the ranks' peak memory
        return [8 << 30] * len(SERVERS)
    if pa.types.is_boolean(field.type):
        return False
    return int(rng.integers(1, 9)) if pa.types.is_integer(field.type) else float(rng.exponential(0.1))


def _publish(k: int) -> pa.Table:
    row = {"version": k + 1, "transport": "nccl", "materialised": False, "bytes": 0, "write_seconds": 0.0}
    texts = {"weights_attempt": "", "uri": "", "sha256": f"{k:064x}"}
    return pa.Table.from_pylist([row | texts | {"load_seconds": [0.4] * len(SERVERS)}], schema=PUBLISH)


def flat_rows(k: int, samples: int, with_tokens: bool) -> pa.Table:
    """An iteration as one table of everything, as a program that dumps its batches would write it."""
    rows = scalar_columns(k, samples)
    given = rows | (token_columns(k, rows) if with_tokens else {})
    schemas = (SCALARS, ROLLOUT, VERIFY, ADVANTAGE) if with_tokens else (SCALARS,)
    fields = {field.name: field for schema in schemas for field in schema}
    return pa.table([_array(given[name], field.type) for name, field in fields.items()], names=list(fields))
