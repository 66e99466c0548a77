"""What becomes of the requests under way on a server that takes new weights (DESIGN §9, "Interruption")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from areal_tasks.engines.lending import Lending
from areal_tasks.engines.routing import Server
from schemas.recipe.interruption import Interruption

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.05


class Interrupter:
    """`mode`: the recipe's, none where nothing is under way then. `continues`: a server that computes its cache again
    continues its requests by itself, as the embedded one does; those of SGLang have to be ended for that."""

    def __init__(self, mode: Interruption | None, continues: bool, lending: Lending) -> None:
        self.mode = mode
        self._continues = continues
        self._lending = lending

    @asynccontextmanager
    async def update(self, server: Server) -> AsyncIterator[dict[str, bool]]:
        """Inside, the server may be ordered to load weights, with these flags. No request may be given to it."""
        if self.mode == "drain":
            await drained([server])
        keeps = self.mode == "in_place"
        continues = keeps or (self.mode == "abort" and self._continues)
        async with self._lending.held(server) if keeps else nullcontext():
            yield {"flush_cache": not keeps, "abort_all_requests": not continues}


async def drained(servers: Sequence[Server]) -> None:
    """Return when no request is under way on these servers."""
    if waits := sum(server.requests for server in servers):
        log.info("new weights wait for the end of %d requests (rollout.interruption: drain)", waits)
    while any(server.requests for server in servers):
        await asyncio.sleep(POLL_SECONDS)
