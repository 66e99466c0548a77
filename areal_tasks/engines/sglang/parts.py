"""A server over several machines: SGLang on each, with some of the tensor-parallel ranks. The first answers requests.

All of its processes meet at a key-value store of torch that the child of the first part serves, at its address alone.
Through the same store the first part has the others fetch weights, while the server generates. A part that ends has the
supervisor start all parts again; so no part watches the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch.distributed as dist

from areal_tasks.engines.fetching import Fetched, weights_folder
from areal_tasks.engines.ports import host_and_port
from areal_tasks.engines.trainer.ranks import serve_store
from areal_tasks.store.backend import Unavailable, open_store
from schemas.errors import UserError

_FOREVER: Final = timedelta(days=20)
FETCHED: Final = "fetched"
AWAY: Final = "away: "  # begins the answer of a part that its store does not answer


class Parts:
    """The parts of a server, as its first one has them fetch weights. One thread at a time uses it."""

    def __init__(self, store: dist.Store, nodes: int) -> None:
        self.store = store
        self.nodes = nodes
        self._orders = 0

    @contextmanager
    def fetching(self, source: str) -> Iterator[None]:
        """Have the others fetch `source` meanwhile. UserError, or Unavailable, on leaving: one could not."""
        self._orders += 1
        self.store.set(f"fetch/{self._orders}", source)
        yield
        for node in range(1, self.nodes):
            self.store.wait([key := f"fetched/{self._orders}/{node}"], _FOREVER)
            if (answer := self.store.get(key).decode()) != FETCHED:
                kind = Unavailable if answer.startswith(AWAY) else UserError
                raise kind(f"machine {node} of this server: {answer.removeprefix(AWAY)}")

    def follow(self, node: int, fetch: Callable[[str], object]) -> None:
        """On part number `node`: fetch what the first one names, as long as that runs."""
        while True:
            self._orders += 1
            self.store.wait([order := f"fetch/{self._orders}"], _FOREVER)
            self.store.set(f"fetched/{self._orders}/{node}", _outcome(fetch, self.store.get(order).decode()))


def _outcome(fetch: Callable[[str], object], source: str) -> str:
    try:
        fetch(source)
    except Exception as error:  # of any kind: the first part waits for an answer without a limit
        return f"{AWAY if isinstance(error, Unavailable) else ''}{error}"
    return FETCHED


def meet(settings: Any) -> Parts:
    """Join the other parts, by SGLang's settings; those after the first follow in a thread."""
    at = host_and_port(settings.dist_init_addr)
    if settings.node_rank == 0:
        return Parts(serve_store(*at, settings.nnodes), settings.nnodes)
    parts = Parts(dist.TCPStore(*at, settings.nnodes, False, _FOREVER, wait_for_workers=False), settings.nnodes)
    store, fetched = open_store(), Fetched()
    follow = threading.Thread(
        target=parts.follow,
        args=(settings.node_rank, lambda source: fetched.hold(weights_folder(store, source))),
        name="parts",
        daemon=True,
    )
    follow.start()
    return parts


def load_from_store(updater: Any, first_machine: bool) -> None:
    """Make the class `updater` find weights that an order names by their URL in the store (`FromStore`).

    Only the first scheduler of a server answers orders. So a failure on another machine ends the process, and with it
    the server: it would go on with two versions of the weights.
    """
    update = updater.update_weights_from_disk

    @wraps(update)
    def loaded(self: Any, order: Any) -> Any:
        """`update_weights_from_disk` with the folder for a URL."""
        if "://" not in order.model_path:
            return update(self, order)
        with weights_folder(open_store(), order.model_path) as folder:
            order.model_path = str(folder)
            output = update(self, order)
        if not (output.success or first_machine):
            raise RuntimeError(output.message)
        return output

    updater.update_weights_from_disk = loaded
