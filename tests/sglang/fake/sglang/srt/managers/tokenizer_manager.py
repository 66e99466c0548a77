"""What looks at a request before SGLang's model sees it. As in SGLang, any token is taken."""

from __future__ import annotations

from typing import Any


class ModelConfig:
    vocab_size = 10


class TokenizerManager:
    model_config = ModelConfig()

    def tokenize(self, body: dict[str, Any]) -> None:
        for input_ids in body["input_ids"]:
            self._validate_one_request(body, input_ids)

    def _validate_one_request(self, obj: dict[str, Any], input_ids: list[int] | None) -> None:
        if input_ids is not None and len(input_ids) > 4:
            raise ValueError("the input is longer than the model's context length")
