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
        "dist-init-addr",
    ):
        parser.add_argument(f"--{name}")
    for name in ("port", "context-length", "tp-size", "random-seed"):
        parser.add_argument(f"--{name}", type=int)
    for name, default in (("nnodes", 1), ("node-rank", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
    flags = "skip-server-warmup enable-memory-saver disable-prefill-cuda-graph disable-custom-all-reduce"
    for name in flags.split():
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(list(argv))
