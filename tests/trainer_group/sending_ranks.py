"""A rank of a trainer whose ranks each share a GPU with a server: `sending_ranks.py FOLDER` plays FOLDER/script.json.

Rank 0 writes what its servers hold after each transfer to FOLDER/answers.json. Memory of the host, which other
processes find by its name, is in the place of GPU memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from waiting import LIMIT, held_back

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer.commands import COMMANDS
from areal_tasks.engines.trainer.process import _follow, make_app
from areal_tasks.engines.trainer.ranks import join
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.settings import read_settings


def states(urls: list[str]) -> list[dict[str, Any]]:
    return [httpx.get(url, timeout=LIMIT).json() for url in urls]


async def play(client: httpx.AsyncClient, script: dict[str, Any]) -> dict[str, Any]:
    """Versions 0 and 2 are sent when all ranks are free, 1 while they train on. With version 2 one server fails."""
    urls = script["urls"]
    receivers = [{"url": url, "trainer_rank": rank} for rank, url in enumerate(urls)]
    secrets = {"transport": "tensor", "receivers": receivers, "token": script["token"]}

    async def ask(name: str, **fields: Any) -> Any:
        command = COMMANDS[name].model_validate({"owner": 1, **fields})
        answer = await client.post(f"/{name}", content=command.model_dump_json())
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def send(version: int, **more: Any) -> dict[str, Any]:
        gone = (await ask("send", version=version, **secrets, **more))["gone"]
        await ask("publish", version=version, prefix=script["prefixes"][version])
        return {"gone": gone, "states": states(urls)}

    await ask("load", version=0, weights=script["initial"])
    found = {"0": await send(0)}
    await ask("train", **script["trains"][0])
    await ask("keep", version=1)
    with held_back(Trainer, "train") as go_on:
        training = asyncio.ensure_future(ask("train", **script["trains"][1]))
        found["1"] = await send(1, keep_cache=True)
        assert not training.done()
        go_on.set()
        await training
    access = {"Authorization": f"Bearer {script['token']}"}
    httpx.post(f"{urls[1]}/fail", json={"how": "500"}, headers=access, timeout=LIMIT).raise_for_status()
    found["2"] = await send(2)
    return found


def main(folder: Path) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    script = json.loads((folder / "script.json").read_text())
    spec = ServiceSpec.model_validate(script["spec"])
    group = join(spec, read_settings(spec.recipe).trainer)
    if group.rank > 0:
        _follow(spec, group)
    app = make_app(spec, group)

    async def scene() -> dict[str, Any]:
        door = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=door, base_url="http://trainer", timeout=LIMIT) as client:
            return await play(client, script)

    (folder / "answers.json").write_text(json.dumps(asyncio.run(scene())))
    os._exit(0)  # the other ranks end with it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
