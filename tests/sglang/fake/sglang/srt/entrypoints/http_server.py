"""The application, as a global that the launcher can put a check before."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang.srt.managers.tokenizer_manager import TokenizerManager


async def health(request: Request) -> JSONResponse:
    return JSONResponse({}, status_code=200)


async def model_info(request: Request) -> JSONResponse:
    return JSONResponse({"weight_version": app.state.settings.weight_version})


async def about(request: Request) -> JSONResponse:
    return JSONResponse({"settings": vars(app.state.settings), "environment": dict(os.environ)})


async def generate(request: Request) -> JSONResponse:
    try:
        TokenizerManager().tokenize(await request.json())
    except ValueError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)
    return JSONResponse({})


async def die(request: Request) -> JSONResponse:
    os._exit(3)


app = Starlette(
    routes=[Route("/health_generate", health), Route("/model_info", model_info), Route("/about", about),
            Route("/die", die), Route("/generate", generate, methods=["POST"])]
)  # fmt: skip
