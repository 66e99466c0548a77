"""SGLang loads weights from a folder. This fetches those that an order names by their URL in the store."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_tasks.engines.external import FETCH, STORE_OF
from areal_tasks.engines.fetching import Fetched, weights_folder
from areal_tasks.store.backend import Store, Unavailable
from schemas.errors import UserError

if TYPE_CHECKING:
    from areal_tasks.engines.sglang.parts import Parts

LOAD: Final = "/update_weights_from_disk"


class FromStore:
    """ASGI middleware. Adds two paths: FETCH has weights fetched that are to be loaded, STORE_OF names the store.

    `parts`: of a server over several machines. Each fetches them, and its schedulers look for them there.
    """

    def __init__(self, app: ASGIApp, store: Store, parts: Parts | None = None) -> None:
        self.app = app
        self.store = store
        self.parts = parts
        self._fetched = Fetched()
        self._last = ("", "")  # the URL and the folder of the weights that were fetched last
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == STORE_OF:
            await JSONResponse({"url": self.store.url})(scope, receive, send)
        elif path in (FETCH, LOAD):
            await self._order(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _order(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            order = json.loads(await Request(scope, receive).body())
            order["model_path"] = await asyncio.to_thread(self._folder, str(order["model_path"]))
        except (ValueError, KeyError, TypeError, UserError, OSError) as error:
            status = 503 if isinstance(error, Unavailable) else 400
            await JSONResponse({"success": False, "message": str(error)}, status)(scope, receive, send)
            return
        if scope["path"] == FETCH:
            await JSONResponse({"success": True})(scope, receive, send)
        else:
            await self.app(scope, _again(order, receive), send)

    def _folder(self, source: str) -> str:
        """The local folder with these weights, or their URL. They stay until those after the next are fetched."""
        if Path(source).is_dir():
            return source
        with self._lock:
            if source != self._last[0]:
                self._last = ("", "")
                with self.parts.fetching(source) if self.parts else nullcontext():
                    folder = self._fetched.hold(weights_folder(self.store, source))
                self._last = (source, source if self.parts else str(folder))
            return self._last[1]


def _again(order: Any, receive: Receive) -> Receive:
    """As `receive`, after the body of a request for `order`."""
    body: list[Message] = [{"type": "http.request", "body": json.dumps(order).encode(), "more_body": False}]

    async def receive_again() -> Message:
        return body.pop() if body else await receive()

    return receive_again
