"""What a person can do about a trainer that ran out of memory, said in one place; imports nothing."""

from __future__ import annotations

from typing import Final

#: Knobs of the recipe in the order in which to try them, as a part of a sentence.
TRAINER_MEMORY: Final = (
    "lower trainer.micro_batch_tokens, then trainer.head_chunk_tokens; set trainer.gradient_checkpointing; set "
    "trainer.cpu_offload (fsdp2, deepspeed); share the model between more trainer.ranks (with deepspeed at a higher "
    "trainer.zero_stage); where a server is on the same GPU, lower inference.memory_fraction or set "
    "inference.release_memory"
)
