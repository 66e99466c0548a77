"""What is said about a service that ran out of memory, by the last lines of real logs."""

from __future__ import annotations

import pytest

from areal_tasks.launchers.advice import CACHE, HOST, SERVER, TRAINER, advice

#: What SGLang 0.5.17 does after any failure of its scheduler: it kills itself.
KILLS_ITSELF = """
[2026-01-01 00:00:00] Received sigquit from a child process. It usually means the child failed.
[2026-01-01 00:00:00] kill_process_tree called: parent_pid=4076, include_parent=True, pid=4076
2026-01-01 00:00:00,779 ERROR areal_tasks.engines.sglang: SGLang ended with -9"""
WEIGHTS_ALONE = (
    "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.15. Raise "
    "--mem-fraction-static above 0.296 (minimum viable = 1 - available/pre = 0.2952). If using speculative decoding, "
    "draft weights are now counted."
)
DIED = "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."


@pytest.mark.parametrize(
    "message",
    [
        WEIGHTS_ALONE,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: …",
        "AssertionError: Memory pool size is too small",
        "Out of memory. Try to lower your batch size.",
        "Prefill out of memory. Try to lower your batch size.",
        "Decode out of memory. Try to lower your batch size.",
        "alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`.",
        "Not enough GPU memory for hybrid (mamba/linear-attention) state cache.",
        "Hybrid (mamba/linear-attention) state cache is too small to serve any requests.",
        "Out of memory even after retracting all other requests in the decode batch.",
    ],
)
def test_no_room_for_the_cache_names_the_fraction(message: str) -> None:
    said = advice("inference-0", message + KILLS_ITSELF)
    assert said == CACHE and "inference.memory_fraction is too small, or other processes" in said


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Exception: Capture cuda graph failed: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_gpu_names_the_knobs_of_its_service(message: str) -> None:
    assert advice("inference-0", message + KILLS_ITSELF) == SERVER
    assert advice("trainer", message) == TRAINER


@pytest.mark.parametrize(
    "message",
    [
        "2026-01-01 00:00:00,779 ERROR areal_tasks.engines.sglang: SGLang ended with -9",
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). {DIED}{KILLS_ITSELF}",
        f"Subprocess detokenizer (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...{KILLS_ITSELF}",
    ],
)
def test_what_somebody_else_killed_wanted_host_memory(message: str) -> None:
    assert advice("inference-0", message) == HOST


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: the model's architecture is not supported",
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). {DIED}",
        "Capture cuda graph failed: an illegal instruction. Possible solutions: 2. if it is an OOM problem, set …",
    ],
)
def test_other_failures_get_no_advice_though_sglang_kills_itself_after_them(message: str) -> None:
    assert advice("inference-0", message + KILLS_ITSELF) == ""
