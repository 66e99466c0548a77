"""Compiles a sharded policy's layers and prints, as JSON, the integers that the compiler leaves open."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from areal_tasks.engines.trainer.policy import decoder_layers
from tests.trainer.compiled_policy import PASSES, learn, make_policy


def open_sizes(found: set[int]) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend that compiles nothing and notes what each symbol stood for when its graph was made."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.update(int(value) for value in inputs if isinstance(value, int | torch.SymInt))
        return graph.forward

    return backend


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: set[int] = set()
    torch.compile = functools.partial(torch.compile, backend=open_sizes(found))
    policy = make_policy(True)
    for layer in decoder_layers(policy):
        fully_shard(layer)
    fully_shard(policy)
    for lengths in PASSES:
        learn(policy, lengths, "packed")
    dist.destroy_process_group()
    json.dump(sorted(found), sys.stdout)


if __name__ == "__main__":
    main()
