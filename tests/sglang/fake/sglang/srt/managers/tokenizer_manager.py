"""What looks at a request before SGLang's model sees it. As in SGLang, any token is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator
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

    def _create_tokenized_object(self, obj: Any) -> Any:
        return obj

    async def generate_request(self, obj: Any) -> AsyncIterator[Any]:
        yield obj

    async def pause_generation(self, order: Any) -> None:
        pass
