"""What a user can do about a service that ran out of memory: recipe fields to change, chosen by the service's log."""

from __future__ import annotations

from typing import Final

#: Recipe fields in the order in which to try them, as a part of a sentence.
TRAINER_MEMORY: Final = (
    "lower trainer.micro_batch_tokens, then trainer.head_chunk_tokens; set trainer.gradient_checkpointing; set "
    "trainer.cpu_offload (fsdp2, deepspeed); share the model between more trainer.ranks (with deepspeed at a higher "
    "trainer.zero_stage); where a server is on the same GPU, lower inference.memory_fraction or set "
    "inference.release_memory"
)
CACHE: Final = (
    "Out of memory: the model left no room for the KV cache: inference.memory_fraction is too small, or other "
    "processes allocated memory of the GPU while the server started. Raise inference.memory_fraction, split "
    "the model with inference.tensor_parallel, or give the server a GPU of its own (inference.gpus, trainer.gpus)."
)
SERVER: Final = (
    "Out of memory: the GPU has no room for what SGLang needs besides weights and cache, or another process fills it."
    " Lower inference.memory_fraction or inference.max_concurrent_requests, split the model with "
    "inference.tensor_parallel, or give server and trainer GPUs of their own (inference.gpus, trainer.gpus); if they "
    "must share one, set inference.release_memory."
)
TRAINER: Final = f"Out of memory. In this order: {TRAINER_MEMORY}."
HOST: Final = (
    "The system probably killed it because host memory ran out: use fewer servers or ranks on this machine, or a "
    "machine with more memory."
)

#: Phrases of SGLang 0.5.17 (kv_cache_configurator, pool_configurator, tp_worker, schedule_batch, allocation), of torch
#: and of CUDA.
CACHE_PHRASES: Final = (
    "Loaded weights leave no GPU memory for the KV cache",
    "Not enough memory. Please try to increase --mem-fraction-static",
    "Not enough GPU memory for hybrid",
    "state cache is too small to serve any requests",
    "Memory pool size is too small",
    "Out of memory even after retracting all other requests",
    "Out of memory. Try to lower your batch size",
    "Prefill out of memory. Try to lower your batch size",
    "Decode out of memory. Try to lower your batch size",
    "alloc_req_slots runs out of memory",
)
DEVICE_PHRASES: Final = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
#: One of SGLang's processes, or all of SGLang, was killed. After any failure SGLang kills itself, but logs that first.
PART_KILLED: Final = ("(exit code: -9)", "crashed with exit code -9.", "SGLang ended with -9")
KILLED_ITSELF: Final = "kill_process_tree called"


def advice(service: str, log: str) -> str:
    """Advice for the message that reports the failure of `service`; empty if its log does not show lack of memory."""
    trainer = not service.startswith("inference")
    if not trainer and _holds(log, CACHE_PHRASES):
        return CACHE
    if _holds(log, DEVICE_PHRASES):
        return TRAINER if trainer else SERVER
    # what another program kills is logged before SGLang kills itself
    return HOST if _holds(log.partition(KILLED_ITSELF)[0], PART_KILLED) else ""


def _holds(log: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in log for phrase in phrases)
