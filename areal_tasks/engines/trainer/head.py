"""Output layer, softmax and loss fused: logits exist for one chunk of the counted tokens at a time, and only once.

The gradient of a token's loss with respect to its logits follows from its logprob, so the forward pass computes it:
nothing as large as the logits is kept for the backward pass, and nothing is computed twice. (Fusing the output layer
with the cross-entropy: Hsu et al., arXiv:2410.10989, §3; here the loss is any function of each token's logprob.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

#: Maps logprobs (with gradient) and entropies of consecutive counted tokens, `layout.where[part]`, to the rows of
#: `objective.STATS`: each token's column depends on that token alone.
TokenLoss = Callable[[Float[Tensor, " t"], Float[Tensor, " t"], slice], Float[Tensor, "K t"]]


class Scores(NamedTuple):
    """Results of one forward pass for the counted tokens, in nats."""

    logprobs: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"]  # of the distribution at each token; without gradient


class Softmax(NamedTuple):
    """Of a chunk's logits z at temperature τ, in nats: log softmax(z/τ) at the targets, entropy, log Σ exp(z/τ)."""

    logprobs: Float[Tensor, " t"]
    entropy: Float[Tensor, " t"]
    normaliser: Float[Tensor, " t"]


@dataclass(frozen=True)
class HeadTask:
    """A computation of the head: scores of `targets`, or with `loss` the sum of `weights` · loss."""

    targets: Int[Tensor, " T"]
    temperature: float
    chunk_tokens: int
    compiled: bool = False
    weights: Float[Tensor, " T"] | None = None
    loss: TokenLoss | None = None

    def chunks(self) -> list[slice]:
        """The counted tokens in runs of about equal length, at most `chunk_tokens`; at least one, perhaps empty."""
        total = len(self.targets)
        count = max(-(-total // self.chunk_tokens), 1)
        ends = [total * (i + 1) // count for i in range(count)]
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


class TokenHead(nn.Linear):
    """Replaces the output layer `linear`, with its parameter; without a task it computes the same."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight

    def forward(self, input: Tensor, task: HeadTask | None = None) -> Any:
        """Logits; with a task `Scores`, or the loss and its rows, of the hidden states `input` [T, hidden]."""
        if task is None:
            return super().forward(input)
        if task.loss is None:
            return score_chunks(input, self.weight, task)
        return _HeadLoss.apply(input, self.weight, task)  # type: ignore[no-untyped-call]


@torch.no_grad()
def score_chunks(hidden: Float[Tensor, "T H"], weight: Float[Tensor, "V H"], task: HeadTask) -> Scores:
    """Logprobs and entropies of the targets, without gradient."""
    softmax, _ = kernels(task.compiled)
    found = [softmax(F.linear(hidden[c], weight), task.targets[c], task.temperature) for c in task.chunks()]
    return Scores(torch.cat([s.logprobs for s in found]), torch.cat([s.entropy for s in found]))


class _HeadLoss(torch.autograd.Function):
    """Σ weights · loss, and the rows of the loss. The backward pass only scales the gradients computed here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, task: HeadTask) -> tuple[Tensor, Tensor]:
        """The weighted loss and its rows [K, T]; keeps the gradients of `hidden` [T, H] and `weight` [V, H]."""
        (softmax, to_logits), chunks = kernels(task.compiled), task.chunks()
        total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
        of_hidden, values = torch.empty_like(hidden), list[Tensor]()
        of_weight: Tensor | None = None
        for chunk in chunks:
            logits, targets = F.linear(hidden[chunk], weight), task.targets[chunk]
            scores = softmax(logits, targets, task.temperature)
            loss, rows, slope = _loss(task, scores, chunk)
            of_logits = to_logits(logits, targets, scores.normaliser, slope, task.temperature)
            torch.mm(of_logits, weight, out=of_hidden[chunk])
            if weight.requires_grad:
                of_weight = _added(of_weight, weight, of_logits, hidden[chunk], len(chunks) > 1)
            total += loss
            values.append(rows)
        ctx.gradients = of_hidden, None if of_weight is None else of_weight.to(weight.dtype)
        every = torch.cat(values, dim=1)
        ctx.mark_non_differentiable(every)
        return total, every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, _of_values: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_hidden, of_weight = ctx.gradients
        del ctx.gradients  # a second backward pass would scale them twice: make it fail
        return of_hidden.mul_(of_total), None if of_weight is None else of_weight.mul_(of_total), None


def _loss(task: HeadTask, scores: Softmax, chunk: slice) -> tuple[Tensor, Float[Tensor, "K t"], Float[Tensor, " t"]]:
    """The weighted sum of a chunk's losses, their rows, and the derivative of the sum with respect to each logprob."""
    assert task.loss is not None and task.weights is not None
    logprobs = scores.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        rows = task.loss(logprobs, scores.entropy, chunk)
        total = (task.weights[chunk] * rows[0]).sum()
    (slope,) = torch.autograd.grad(total, logprobs)
    return total.detach(), rows.detach(), slope


def _added(
    so_far: Tensor | None, weight: Tensor, of_logits: Float[Tensor, "t V"], hidden: Float[Tensor, "t H"], several: bool
) -> Tensor:
    """The weight's gradient with a chunk's part, accumulated in fp32 if there are several chunks."""
    if not several:
        return of_logits.t() @ hidden
    total = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if so_far is None else so_far
    accumulate(total, of_logits, hidden)
    return total


def accumulate(total: Float[Tensor, "V H"], of_logits: Float[Tensor, "t V"], hidden: Float[Tensor, "t H"]) -> None:
    """total += of_logitsᵀ · hidden, in `total`'s precision; on a GPU without a second matrix of that size."""
    if total.dtype == hidden.dtype:
        total.addmm_(of_logits.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, of_logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.add_(of_logits.t() @ hidden)


def softmax_chunk(logits: Float[Tensor, "t V"], targets: Int[Tensor, " t"], temperature: float) -> Softmax:
    """`Softmax` in fp32 (or wider), as sums over rows, which a compiler fuses into two passes over the logits.

    Entropy is log Σ exp(d) - Σ d·exp(d) / Σ exp(d), with d a scaled logit minus the row's largest.
    """
    scaled = logits.to(_wide(logits.dtype)) / temperature
    largest = scaled.amax(-1)
    below = (scaled - largest[:, None]).clamp_min(torch.finfo(scaled.dtype).min)  # -inf · 0 would be NaN
    shares = below.exp()
    total = shares.sum(-1)
    normaliser = largest + total.log()
    entropy = total.log() - (shares * below).sum(-1) / total
    chosen = logits.gather(-1, targets[:, None])[:, 0].to(scaled.dtype) / temperature
    return Softmax(chosen - normaliser, entropy, normaliser)


def logits_gradient(
    logits: Float[Tensor, "t V"],
    targets: Int[Tensor, " t"],
    normaliser: Float[Tensor, " t"],
    slope: Float[Tensor, " t"],
    temperature: float,
) -> Float[Tensor, "t V"]:
    """slope · ∂ logprob / ∂ logits = slope · (1[target] - softmax) / τ, in the logits' dtype."""
    shares = torch.exp(logits.to(_wide(logits.dtype)) / temperature - normaliser[:, None])
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((hit.to(shares.dtype) - shares) * (slope / temperature)[:, None]).to(logits.dtype)


def kernels(compiled: bool) -> tuple[Callable[..., Softmax], Callable[..., Tensor]]:
    """`softmax_chunk` and `logits_gradient`, eager or compiled into a few passes over the logits."""
    return (_fused(softmax_chunk), _fused(logits_gradient)) if compiled else (softmax_chunk, logits_gradient)


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, fullgraph=True)

    def call(logits: Tensor, *others: Any) -> Any:
        """Call the compiled function for any number of rows."""
        if not len(logits):
            return function(logits, *others)
        for tensor in (logits, *(o for o in others if isinstance(o, Tensor))):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the vocabulary stays a constant
        return compiled(logits, *others)

    return call


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
