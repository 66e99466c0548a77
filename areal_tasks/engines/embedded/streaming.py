"""Streamed answers, in SGLang's format: `data: {…}` with the answer so far, finally `data: [DONE]`.

Each event repeats the content of earlier ones. Events are skipped if sending is slower than the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import orjson
from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse

from areal_tasks.engines.embedded.api import Answerable, BadRequest, partial_answer
from areal_tasks.engines.embedded.engine import Engine, NotFinite
from areal_tasks.engines.embedded.sequence import Job, Sequence
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError

#: The errors that a request may fail with.
FAILURES: Final = (Unavailable, BadRequest, UserError, NotFinite, RuntimeError)


def status_of(error: Exception) -> int:
    """HTTP status: 400 for the caller's mistake, 500 for damaged weights, 503 when the engine or the store is gone."""
    if isinstance(error, NotFinite):
        return 500
    return 400 if isinstance(error, BadRequest | UserError) and not isinstance(error, Unavailable) else 503


def stream(engine: Engine, asked: Answerable) -> Response:
    """Answer a request for one sample by events. If the client disconnects, the sample is aborted."""
    release = BackgroundTask(engine.abort, set(asked.sequences).__contains__)  # runs after the last event, too
    return StreamingResponse(_events(engine, asked), media_type="text/event-stream", background=release)


async def _events(engine: Engine, asked: Answerable) -> AsyncIterator[bytes]:
    [sequence] = asked.sequences
    updates: asyncio.Queue[Sequence | Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(update: Sequence | Exception) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, update)

    sequence.listener = put
    engine.submit(Job([sequence], lambda error: put(error or sequence)))
    latest: Sequence | Exception | None = None
    while latest is None or (isinstance(latest, Sequence) and latest.finish is None):
        latest = await _newest(updates)
        yield b"data: " + _event(engine, asked, latest) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _newest(updates: asyncio.Queue[Sequence | Exception]) -> Sequence | Exception:
    newest = await updates.get()
    while not updates.empty():
        newest = updates.get_nowait()
    return newest


def _event(engine: Engine, asked: Answerable, latest: Sequence | Exception) -> bytes:
    if isinstance(latest, Sequence):
        return partial_answer(asked, latest, engine.detokenizer, engine.version)
    return orjson.dumps({"error": {"message": str(latest), "code": status_of(latest)}})
