"""SGLang's parser, for the flags that the tests use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def prepare_server_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang serve")
    for name in (
        "model-path",
        "host",
        "dtype",
        "weight-version",
        "attention-backend",
        "api-key",
        "ssl-keyfile",
        "ssl-certfile",
    ):
        parser.add_argument(f"--{name}")
    for name in ("port", "context-length", "tp-size", "random-seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
    for name in ("skip-server-warmup", "enable-memory-saver", "disable-prefill-cuda-graph"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(list(argv))
