"""The policy as a module: a Hugging Face causal language model that scores the tokens that count, and their loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from areal_tasks.engines.trainer.backend import Scores, TokenLoss
from areal_tasks.engines.trainer.forward import DeviceLayout, token_scores
from schemas.recipe.sections import Model, Trainer

#: The loss to minimise, a scalar with gradient, and the rows of the `TokenLoss` behind it, without.
Loss = tuple[Float[Tensor, ""], Float[Tensor, "K T"]]


class Policy(nn.Module):
    """`model` with a head that sees only the positions that predict a counted token.

    Call it, never its `forward`: sharding hangs on the call's hooks. Wrappers must not cast its floating-point
    arguments (`MixedPrecisionPolicy(cast_forward_inputs=False)`). Its parameters have the model's own names, after
    `model.`.
    """

    def __init__(self, model: Any, head_chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.head_chunk_tokens = head_chunk_tokens

    def forward(
        self,
        layout: DeviceLayout,
        temperature: float,
        weights: Float[Tensor, " T"] | None = None,
        loss: TokenLoss | None = None,
    ) -> Scores | Loss:
        """Scores of the counted tokens; with a `loss` and the tokens' `weights`, Σ weights · loss and its rows."""
        scores = token_scores(self._logits(layout), layout.targets, temperature)
        if loss is None or weights is None:
            return scores
        values = loss(scores.logprobs, scores.entropy, slice(0, len(layout.targets)))
        return (weights * values[0]).sum(), values.detach()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors under their own names, as they are held; one that is tied to another comes once."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def _logits(self, layout: DeviceLayout) -> Float[Tensor, "T V"]:
        """Logits at the positions that predict counted tokens, and nowhere else.

        The positions are picked right before the output layer: with a large vocabulary the logits of prompts and
        padding would cost more than the transformer. Whatever the model does to its logits afterwards still happens.
        """

        def pick(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].flatten(0, 1).index_select(0, layout.predictors).unsqueeze(0), *inputs[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            output = self.model(input_ids=layout.input_ids, position_ids=layout.position_ids, use_cache=False)
        finally:
            handle.remove()
        logits: Tensor = output.logits[0]
        return logits


def load_policy(folder: Path, settings: Trainer, model_settings: Model, device: torch.device) -> Policy:
    """The causal language model in `folder` with fp32 parameters on `device`, dropout off.

    In which precision it computes (`model.dtype`) is its backend's business.
    """
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return Policy(model.eval().to(device), settings.head_chunk_tokens)
