"""What a person can do about a service that ran out of memory: the recipe's knobs, by what its log says."""

from __future__ import annotations

from typing import Final

CACHE: Final = (
    "Out of memory: no room was left for the key-value cache beside the model. Raise inference.memory_fraction, split "
    "the model with inference.tensor_parallel, or give the server a GPU of its own (inference.gpus, trainer.gpus)."
)
SERVER: Final = (
    "Out of memory: the GPU could not hold what SGLang needs beyond its weights and cache, or another process fills it."
    " Lower inference.memory_fraction or inference.max_concurrent_requests, split the model with "
    "inference.tensor_parallel, or give server and trainer GPUs of their own (inference.gpus, trainer.gpus); if they "
    "must share one, set inference.release_memory."
)
TRAINER: Final = (
    "Out of memory: lower trainer.micro_batch_tokens or trainer.head_chunk_tokens, set trainer.gradient_checkpointing "
    "or trainer.cpu_offload, or split the model over more GPUs (trainer.ranks, with deepspeed a higher "
    "trainer.zero_stage); if an inference server shares the GPU, lower inference.memory_fraction or set "
    "inference.release_memory."
)
HOST: Final = (
    "The system probably killed it for want of host memory: use fewer servers or ranks on this machine, or one with "
    "more memory."
)

#: Phrases of SGLang 0.5.17 (pool_configurator, tp_worker, schedule_batch, allocation) and of torch.
CACHE_PHRASES: Final = (
    "Not enough memory. Please try to increase --mem-fraction-static",
    "Memory pool size is too small",
    "Out of memory even after retracting all other requests",
    "Prefill out of memory. Try to lower your batch size",
    "Decode out of memory. Try to lower your batch size",
)
DEVICE_PHRASES: Final = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA error: out of memory",
)
HOST_PHRASES: Final = ("OS OOM killer", "SGLang ended with -9")


def advice(service: str, log: str) -> str:
    """A sentence for the message that reports the failure of `service`; empty if its log shows no want of memory."""
    trainer = not service.startswith("inference")
    if not trainer and _holds(log, CACHE_PHRASES):
        return CACHE
    if _holds(log, DEVICE_PHRASES):
        return TRAINER if trainer else SERVER
    return HOST if _holds(log, HOST_PHRASES) else ""


def _holds(log: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in log for phrase in phrases)
