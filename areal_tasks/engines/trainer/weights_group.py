"""The group of a trainer's first rank and of every rank of its inference servers, over which weights are broadcast.

Its other members are other programs, which join as SGLang's `init_custom_process_group` does. torch has no public call
that leads such a group: `new_group` and the helper below it derive a new NCCL communicator from the default group's
(ncclCommSplit) where that one is bound to a GPU, as the trainer's is; servers, being no part of it, would wait forever.
So it is made here, beside the default group, over the store keys at which the others look for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_tasks.engines.ports import HOST
from areal_tasks.engines.trainer.process_group import serve_store, stay_on_loopback

#: The device under whose name torch keeps a backend's keys: the first that the backend serves.
DEVICES: Final = {"gloo": "cpu", "nccl": "cuda"}


def lead(name: str, port: int, size: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Open the store at which `size` - 1 others meet this process, rank 0, in a group called `name`.

    Over gloo this returns when all are there; over NCCL they meet at the first broadcast.
    """
    device = DEVICES[backend]
    stay_on_loopback()
    store = serve_store(HOST, port, size, timeout)
    inner = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))  # init_custom_process_group's and torch's
    made = _backend(backend, dist.PrefixStore(f"{device}/", inner), size, name, timeout)
    group = dist.ProcessGroup(inner, 0, size)
    kind = c10d.Backend.backend_type_map[backend]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, made)
    group._set_group_name(name)
    return group


def _backend(backend: str, store: dist.Store, size: int, name: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return c10d.ProcessGroupGloo(store, 0, size, timeout)
    options = c10d.ProcessGroupNCCL.Options()  # `split_from` stays unset: see above
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = []
    return c10d.ProcessGroupNCCL(store, 0, size, options)
