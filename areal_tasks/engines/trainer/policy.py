"""The policy as a module: a Hugging Face causal language model that returns scores of counted tokens, or their loss."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from areal_tasks.data.batching import Layout
from areal_tasks.engines.names import Names
from areal_tasks.engines.trainer.forward import token_scores
from areal_tasks.engines.trainer.head import HeadTask, Scores, TokenHead, TokenLoss
from schemas.recipe.training import Trainer

#: The loss to minimise, a scalar with gradient, and the rows of its `TokenLoss`, without gradient.
Loss = tuple[Float[Tensor, ""], Float[Tensor, "K T"]]
#: Models whose logits are their last hidden states times a matrix and nothing else, in transformers 5.12 and 5.23.
PLAIN_HEADS: Final = frozenset(
    {
        "arcee", "exaone4", "gemma", "glm", "glm4", "helium", "llama", "ministral", "mistral", "olmo", "olmo2", "olmo3",
        "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
    }
)  # fmt: skip
_MARKED: Final = "_arealflow_sizes_vary"  # attribute of tensors whose sizes are marked as dynamic for the compiler
log = logging.getLogger(__name__)


class Policy(nn.Module):
    """`model` with a head that computes only the positions that predict a counted token, in chunks.

    Call the module, never `forward`: sharding relies on the call's hooks. Wrappers must not cast its floating-point
    arguments (`MixedPrecisionPolicy(cast_forward_inputs=False)`). Its parameters have the model's names with the prefix
    `model.`; `names` maps them to those of the checkpoint, by default the same.
    """

    def __init__(self, model: Any, head_chunk_tokens: int, compiled: bool = False, names: Names | None = None) -> None:
        super().__init__()
        self.model = model
        self.names = names or Names(model, model.state_dict())
        self.head_chunk_tokens = head_chunk_tokens
        self.compiled = compiled
        self.fused = has_plain_head(model)
        if self.fused:
            model.set_output_embeddings(TokenHead(model.get_output_embeddings()))

    def forward(
        self,
        layout: Layout,
        temperature: float,
        weights: Float[Tensor, " T"] | None = None,
        loss: TokenLoss | None = None,
    ) -> Scores | Loss:
        """Scores of the counted tokens; with a `loss` and the tokens' `weights`, Σ weights · loss and its rows."""
        if self.fused:
            task = HeadTask(layout.targets, temperature, self.head_chunk_tokens, self.compiled, weights, loss)
            hidden = self.model.base_model(**_inputs(layout)).last_hidden_state
            found: Scores | Loss = self.model.get_output_embeddings()(_picked(hidden, layout), task)
            return found
        scores = token_scores(self._logits(layout), layout.targets, temperature)
        if loss is None or weights is None:
            return scores
        values = loss(scores.logprobs, scores.entropy, slice(0, len(layout.targets)))
        return (weights * values[0]).sum(), values.detach()

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that belong to the checkpoint; whole on every rank."""
        return ((name, self.model.get_buffer(name)) for name in self.names.buffers)

    def _logits(self, layout: Layout) -> Float[Tensor, "T V"]:
        """Logits at the positions that predict counted tokens only, all at once: for models without a plain head.

        They are picked right before the output layer: all that the model does to its logits afterwards still happens.
        """

        def pick(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (_picked(inputs[0], layout).unsqueeze(0), *inputs[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            output = self.model(**_inputs(layout))
        finally:
            handle.remove()
        logits: Tensor = output.logits[0]
        return logits


def has_plain_head(model: Any) -> bool:
    """Whether the model's logits are known to be one matrix product."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.bias is None and model.config.model_type in PLAIN_HEADS


def prepare(policy: Policy, settings: Trainer) -> Policy:
    """Set up compilation of layers and final norm at their first call, and recomputation of activations, if set."""
    if not policy.fused:
        log.warning("models of type %s compute all logits of a pass at once", policy.model.config.model_type)
    for layer in decoder_layers(policy):
        if settings.compile:
            layer.forward = compiled(layer.forward)
        if settings.gradient_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    norm = getattr(policy.model.base_model, "norm", None)
    if settings.compile and norm is not None:
        norm.forward = compiled(norm.forward)  # eager, it makes half a dozen fp32 copies of the hidden states
    return policy


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call, for any number of tokens; layers share one compiled graph.

    Varying sizes are marked on each tensor. `dynamic=True` would also make the integers of a sharded module dynamic
    (dynamo treats only those of other modules as constants), such as its head dimension: kernels that divide by it to
    compute indices take up to nine times as long.
    """
    found = torch.compile(function)

    def call(*args: Any, **options: Any) -> Any:
        """Call the compiled function with sizes marked as dynamic."""
        for tensor in _tensors((*args, *options.values())):
            if not hasattr(tensor, _MARKED):  # most tensors are the same for every layer
                torch._dynamo.maybe_mark_dynamic(tensor, [0, 1][: tensor.ndim])  # rows and positions, or bounds
                setattr(tensor, _MARKED, True)
        return found(*args, **options)

    return call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among a layer's arguments and in their tuples: torch's own traversal takes as long as its guards."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def decoder_layers(policy: Policy) -> list[nn.Module]:
    """The transformer's layers: the modules that Hugging Face says must not be split."""
    names = set(policy.model._no_split_modules or ())
    return [module for module in policy.model.modules() if type(module).__name__ in names]


def _inputs(layout: Layout) -> dict[str, Any]:
    given = {"input_ids": layout.input_ids, "position_ids": layout.position_ids, "use_cache": False}
    if layout.bounds is None or layout.position_ids is None:
        return given
    samples = (layout.position_ids == 0).cumsum(1, dtype=torch.int32) - 1  # kernels of convolutions and states use it
    return {**given, "cu_seq_lens_q": layout.bounds, "max_length_q": layout.longest, "seq_idx": samples}


def _picked(hidden: Float[Tensor, "R L H"], layout: Layout) -> Float[Tensor, "T H"]:
    picked: Tensor = _Pick.apply(hidden.flatten(0, 1), layout.predictors)  # type: ignore[no-untyped-call]
    return picked


class _Pick(torch.autograd.Function):
    """Distinct rows of a matrix, so that the backward pass copies their gradients instead of adding them up."""

    @staticmethod
    def forward(ctx: Any, matrix: Float[Tensor, "N H"], rows: Int[Tensor, " T"]) -> Float[Tensor, "T H"]:
        ctx.save_for_backward(rows)
        ctx.shape = matrix.shape
        return matrix.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "N H"], None]:
        (rows,) = ctx.saved_tensors
        return of_rows.new_zeros(ctx.shape).index_copy_(0, rows, of_rows), None


# ── passes in lower precision than that of the weights ──────────────────────────────────────────────────────────────


def working_copy(master: Policy, dtype: torch.dtype) -> Policy:
    """A copy of `master` in `dtype` whose gradients, pass by pass, add up in fp32 in the parameters of `master`.

    Buffers keep their precision: rotary frequencies need it.
    """
    taken: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in master.parameters()}
    work = copy.deepcopy(master, taken | {id(master.names): master.names})  # reuses these: no fp32 copy
    for low, high in zip(work.parameters(), master.parameters(), strict=True):
        low.register_post_accumulate_grad_hook(partial(_add_gradient, high))  # type: ignore[no-untyped-call]
    return work


def _add_gradient(high: Tensor, low: Tensor) -> None:
    """Add the gradient of a low-precision parameter to `high`'s, and free it."""
    assert low.grad is not None
    if high.grad is None:
        high.grad = low.grad.to(high.dtype)
    else:
        high.grad.add_(low.grad)
    low.grad = None
