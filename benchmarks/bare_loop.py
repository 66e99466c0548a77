"""The quickstart as a bare Python loop: SFT, then GRPO, with no store, HTTP, processes or Prefect.

The baseline of `benchmarks/overhead.py`, and a check of the quickstart's settings: it reads the same recipes and uses
the same model, data, order and learning rates, and nothing else of the project.

    python -m benchmarks.bare_loop [--seeds 1,2,3] [key=value …]     (overrides of the rlhf recipe)
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from areal_tasks.data.datasets import sums
from areal_tasks.data.sampler import row_of_group
from areal_tasks.data.scratch import character_tokenizer, scratch_model
from areal_tasks.engines.trainer.optimizer import learning_rate
from schemas.manifest import PROMPT_ORDER
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe, SftRecipe
from schemas.recipe.sections import ScratchModel
from schemas.recipe.training import Trainer

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Bare:
    """The measurements of one run of the loop."""

    sft_seconds: float
    rl_seconds: float
    rewards: list[float]  # mean reward of each iteration
    accuracy_before: float  # greedy, on the held-out split
    accuracy_after: float

    def mean_reward(self, part: slice) -> float:
        chosen = self.rewards[part]
        return sum(chosen) / len(chosen)


@dataclass(frozen=True)
class Batch:
    """Samples of one iteration, prompts of one length: `B` rows of `P` prompt and `C` completion tokens."""

    ids: torch.Tensor  # [B, P + C]
    mask: torch.Tensor  # [B, C] bool: generated, the end-of-sequence token included
    logprobs: torch.Tensor  # [B, C]


def bare_run(sft: SftRecipe, rlhf: RlhfRecipe) -> Bare:
    """SFT by the recipe `sft`, then GRPO by `rlhf`, in this process. Times exclude evaluation and imports."""
    spec = cast(ScratchModel, sft.model.scratch)
    tokenizer = character_tokenizer(spec.alphabet, sft.model.max_length)
    model = scratch_model(spec, len(tokenizer), sft.seed, sft.model.max_length)
    rows = list(sums(rlhf.data.source, rlhf.data.train_split))
    held_out = list(sums(rlhf.data.source, rlhf.data.eval_split))[: rlhf.evaluation.limit or None]
    sft_seconds = _timed_sft(model, tokenizer, rows, sft)
    before = accuracy(model, tokenizer, held_out, rlhf.evaluation.max_new_tokens)
    started = time.perf_counter()
    rewards = list(grpo(model, tokenizer, rows, rlhf))
    seconds = time.perf_counter() - started
    after = accuracy(model, tokenizer, held_out, rlhf.evaluation.max_new_tokens)
    return Bare(sft_seconds, seconds, rewards, before, after)


def _timed_sft(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, recipe: SftRecipe) -> float:
    started = time.perf_counter()
    supervised(model, tokenizer, rows, recipe)
    return time.perf_counter() - started


def optimizer(model: LlamaForCausalLM, t: Trainer, steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW in one fused kernel, and the recipe's learning rate at each step as a share of its peak."""
    adamw = torch.optim.AdamW(model.parameters(), t.lr, (t.beta1, t.beta2), t.eps, t.weight_decay, fused=True)
    return adamw, LambdaLR(adamw, lambda step: learning_rate(step, steps, t) / t.lr)


def supervised(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, recipe: SftRecipe) -> None:
    """Train by cross-entropy on answer and end token."""
    steps = recipe.schedule.iterations * recipe.algorithm.steps
    adamw, schedule = optimizer(model, recipe.trainer, steps)
    for step in range(steps):
        first = step * recipe.algorithm.batch_size
        chosen = rows_of(rows, range(first, first + recipe.algorithm.batch_size), recipe.seed)
        ids, labels = demonstrations(tokenizer, chosen)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        _step(model, loss, adamw, schedule, recipe.trainer.max_grad_norm)


def rows_of(rows: Rows, groups: range, seed: int) -> Rows:
    """The rows that these groups of a new run read."""
    return [rows[row_of_group(group, len(rows), seed, PROMPT_ORDER)] for group in groups]


def demonstrations(tokenizer: PreTrainedTokenizerFast, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B, T], labels [B, T]); labels are -100 on prompt and padding."""
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([answer for _, answer in rows])["input_ids"]]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def grpo(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, recipe: RlhfRecipe
) -> Iterator[float]:
    """Train by GRPO. Returns the mean reward of each iteration."""
    sampling = recipe.rollout
    steps = recipe.schedule.iterations * recipe.algorithm.minibatches
    adamw, schedule = optimizer(model, recipe.trainer, steps)
    random = torch.Generator().manual_seed(recipe.seed)
    for iteration in range(recipe.schedule.iterations):
        groups = range(iteration * sampling.groups, (iteration + 1) * sampling.groups)
        chosen = [row for row in rows_of(rows, groups, recipe.seed) for _ in range(sampling.group_size)]
        prompts = [prompt for prompt, _ in chosen]
        batch = generate(model, tokenizer, prompts, sampling.max_new_tokens, sampling.temperature, random)
        rewards = score(tokenizer, batch, [answer for _, answer in chosen])
        advantages = group_advantages(rewards.view(-1, sampling.group_size)).flatten()
        for part in torch.randperm(len(chosen), generator=random).chunk(recipe.algorithm.minibatches):
            loss = policy_loss(model, batch, part, advantages[part], recipe.algorithm.clip_ratio, sampling.temperature)
            _step(model, loss, adamw, schedule, recipe.trainer.max_grad_norm)
        yield float(rewards.mean())


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    new_tokens: int,
    temperature: float,
    random: torch.Generator | None,
) -> Batch:
    """One completion per prompt, decoded in one batch; greedy without a generator. All prompts have the same length."""
    ids = torch.tensor(tokenizer(list(prompts))["input_ids"])
    new, cache, alive = ids, None, torch.ones(len(prompts), dtype=torch.bool)
    tokens, masks, logprobs = [], [], []
    for _ in range(new_tokens):
        output = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, scores = output.past_key_values, (output.logits[:, -1] / temperature).log_softmax(-1)
        greedy = random is None
        new = scores.argmax(-1, keepdim=True) if greedy else torch.multinomial(scores.exp(), 1, generator=random)
        tokens.append(new)
        masks.append(alive)
        logprobs.append(scores.gather(-1, new))
        alive = alive & (new[:, 0] != tokenizer.eos_token_id)
        if not alive.any():
            break
    return Batch(torch.cat([ids, *tokens], 1), torch.stack(masks, 1), torch.cat(logprobs, 1))


def score(tokenizer: PreTrainedTokenizerFast, batch: Batch, answers: Sequence[str]) -> torch.Tensor:
    """1 where the completion is exactly the answer, else 0: [B]."""
    width = batch.mask.shape[1]
    made = [row[-width:][mask].tolist() for row, mask in zip(batch.ids, batch.mask, strict=True)]
    texts = tokenizer.batch_decode(made, skip_special_tokens=True)
    return torch.tensor([float(text == answer) for text, answer in zip(texts, answers, strict=True)])


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [groups, group_size] less their group's mean, over its standard deviation."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, correction=0, keepdim=True) + 1e-6)


def policy_loss(
    model: LlamaForCausalLM,
    batch: Batch,
    part: torch.Tensor,
    advantages: torch.Tensor,
    clip_ratio: float,
    temperature: float,
) -> torch.Tensor:
    """PPO's clipped loss, mean over the generated tokens of the rows `part`."""
    ids, mask = batch.ids[part], batch.mask[part]
    width = mask.shape[1]
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=width).logits / temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]
    ratio = (logprobs - batch.logprobs[part]).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    terms = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return terms[mask].mean()


def _step(
    model: LlamaForCausalLM,
    loss: torch.Tensor,
    adamw: Optimizer,
    schedule: LRScheduler,
    max_norm: float,
) -> None:
    adamw.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    adamw.step()
    schedule.step()


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, new_tokens: int) -> float:
    """Share of `rows` answered exactly by greedy decoding."""
    batch = generate(model, tokenizer, [p for p, _ in rows], new_tokens, 1.0, None)
    return float(score(tokenizer, batch, [answer for _, answer in rows]).mean())


def machine() -> str:
    """The machine and the software, in one line."""
    cores, python = os.cpu_count(), platform.python_version()
    return f"{platform.machine()}, {cores} cores, Python {python}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1", help="seeds of the runs, separated by commas")
    parser.add_argument("--sft", action="append", default=[], help="an override of the sft recipe")
    parser.add_argument("overrides", nargs="*", help="overrides of the rlhf recipe")
    arguments = parser.parse_args()
    print(machine())
    print("seed  sft s   rl s  reward: first 25  last 25   greedy: before  after   curve (means of 25)")
    for seed in map(int, arguments.seeds.split(",")):
        sft, rlhf = _recipes(seed, arguments.sft, arguments.overrides)
        print(row(seed, bare_run(sft, rlhf)), flush=True)


def _recipes(seed: int, changed: Sequence[str], overrides: Sequence[str]) -> tuple[SftRecipe, RlhfRecipe]:
    rlhf = cast(RlhfRecipe, load_recipe("quickstart", [f"seed={seed}", *overrides]))
    return cast(SftRecipe, load_recipe(rlhf.model.warm_start, [f"seed={seed}", *changed])), rlhf


def row(seed: int, run: Bare) -> str:
    """One line of the table."""
    curve = " ".join(f"{run.mean_reward(slice(i, i + 25)):.2f}" for i in range(0, len(run.rewards), 25))
    return (
        f"{seed:4d} {run.sft_seconds:6.1f} {run.rl_seconds:6.1f} {run.mean_reward(slice(25)):17.3f} "
        f"{run.mean_reward(slice(-25, None)):8.3f} {run.accuracy_before:16.3f} {run.accuracy_after:6.3f}   {curve}"
    )


if __name__ == "__main__":
    main()
