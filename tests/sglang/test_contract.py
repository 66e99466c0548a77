"""The same cases against the embedded server, always, and against SGLang where it is installed.

    AREAL_TEST_SGLANG_MODEL=/path/to/model python3 -m pytest -o addopts= tests/sglang/test_contract.py -q -k real_server

`-k real_server` takes the cases on SGLang only, `-k embedded_server` those on our own; `sglang` is in every name, since
it is the folder's. Add `and stream` for those of streaming, `and experts` for those of a mixture of experts, which need
no model; `and alone` takes those that SGLang alone has: whether all weights arrive, and who can reach its sockets.
`AREAL_TEST_SGLANG_DTYPE` (bfloat16) and `AREAL_TEST_SGLANG_FLAGS` (JSON, as `inference.flags`) can be set. Where time
is limited, `-v -o timeout=240 --session-timeout=300` ends a case that hangs, then the run, and prints the failures; a
`timeout` around it would leave nothing of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.recipe.launcher import Launcher
from tests.inference.conftest import make_model
from tests.sglang.contract import CASES
from tests.sglang.contract_interruption import INTERRUPTION_CASES
from tests.sglang.contract_streaming import STREAMING_CASES
from tests.sglang.contract_target import Target
from tests.sglang.contract_weights import (
    EXPERT_CASES,
    SGLANG_CASES,
    SGLANG_EXPERT_CASES,
    make_experts,
    published,
)

MODEL = os.environ.get("AREAL_TEST_SGLANG_MODEL", "")
DTYPE = os.environ.get("AREAL_TEST_SGLANG_DTYPE", "bfloat16")
#: The flags that a trimmed SGLang needs (shared/gpu): kernels that are compiled on the host, or none.
TRIMMED = '{"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", '
TRIMMED += '"disable-prefill-cuda-graph": true}'
EXACT, ROUNDED = (2e-5, 5e-4), (0.05, 1.0)  # mean and largest |Δ logprob| that float32 and bfloat16 may show


def installed() -> bool:
    spec = find_spec("sglang")
    return spec is not None and spec.origin is not None


def moved(folder: Path, into: Path, dtype: torch.dtype) -> Path:
    """A copy of a model folder whose weights are visibly others."""
    shutil.copytree(folder, into)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    model.to(dtype).save_pretrained(into)
    return into


def start(
    root: Path, engine: str, folder: Path, model: dict[str, Any], inference: dict[str, Any], other: Path | None = None
) -> Iterator[Target]:
    """The server as the product starts it: a supervised service on weights of a store."""
    store = open_store((root / "store").as_uri())
    attempt = new_attempt()
    files = upload(store, weights_attempt("contract", 3, attempt), folder)
    weights = commit_weights(store, "contract", 3, attempt, "weights", files, make_provenance(1, now()))
    exact = model["dtype"] == "float32"
    recipe = {"seed": 0, "model": {"path": "m", **model}, "inference": {"engine": engine, **inference}}
    spec = ServiceSpec(
        name="inference-0", restart=0, store_url=store.url, run="contract", owner=1, recipe=recipe, weights=weights
    )
    other = other or moved(folder, root / "other", getattr(torch, model["dtype"]))
    with Supervisor(store, Launcher(startup_seconds=600.0), root / "logs") as supervisor:
        supervisor.start(f"areal_tasks.engines.{engine}", spec, threads=1 if engine == "embedded" else 0)
        [url] = supervisor.wait(["inference-0"])
        gaps, process = EXACT if exact else ROUNDED, supervisor.services["inference-0"].handle.process.pid  # type: ignore[attr-defined]
        yield Target(url, supervisor.token, folder, other, model["max_length"], *gaps, process)


REAL = pytest.param("sglang", id="real_server")
SERVERS = [pytest.param("embedded", id="embedded_server"), REAL]


@pytest.fixture(scope="module", params=SERVERS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "embedded":
        folder = make_model(root / "model", seed=0, max_position_embeddings=256)
        model = {"max_length": 256, "dtype": "float32"}
        yield from start(root, "embedded", folder, model, {"slots": 32, "threads": 1})
        return
    if not MODEL or not installed():
        pytest.skip("AREAL_TEST_SGLANG_MODEL is not set, or SGLang is not installed")
    flags = json.loads(os.environ.get("AREAL_TEST_SGLANG_FLAGS", TRIMMED))
    model = {"max_length": 1024, "dtype": DTYPE}
    yield from start(root, "sglang", Path(MODEL).resolve(), model, {"flags": flags, "memory_fraction": 0.5})


@pytest.fixture(scope="module", params=SERVERS)
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server of a mixture of experts; its other weights are published by our trainer."""
    root = tmp_path_factory.mktemp(f"experts-{request.param}")
    if request.param == "sglang" and not installed():
        pytest.skip("SGLang is not installed")
    folder = make_experts(root / "model", max_length=256)
    if request.param == "embedded":
        model, settings = {"max_length": 256, "dtype": "float32"}, {"slots": 8, "threads": 1}
    else:
        flags = json.loads(os.environ.get("AREAL_TEST_SGLANG_FLAGS", TRIMMED)) | {"moe-runner-backend": "triton"}
        model, settings = {"max_length": 256, "dtype": DTYPE}, {"flags": flags, "memory_fraction": 0.3}
    other = published(folder, root / "other", str(model["dtype"]))
    yield from start(root, request.param, folder, model, settings, other)


def named(case: Callable[[Target], None]) -> str:
    return case.__name__


@pytest.mark.parametrize("case", CASES + INTERRUPTION_CASES + STREAMING_CASES, ids=named)
def test_contract(case: Callable[[Target], None], target: Target) -> None:
    case(target)


@pytest.mark.parametrize("target", [REAL], indirect=True)
@pytest.mark.parametrize("case", SGLANG_CASES, ids=named)
def test_sglang_alone(case: Callable[[Target], None], target: Target) -> None:
    case(target)


@pytest.mark.parametrize("case", EXPERT_CASES, ids=named)
def test_experts(case: Callable[[Target], None], experts: Target) -> None:
    case(experts)


@pytest.mark.parametrize("experts", [REAL], indirect=True)
@pytest.mark.parametrize("case", SGLANG_EXPERT_CASES, ids=named)
def test_sglang_alone_with_experts(case: Callable[[Target], None], experts: Target) -> None:
    case(experts)
