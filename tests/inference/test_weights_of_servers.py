"""Where servers get new weights from: the store if they can read it, else a folder that they have to see."""

from __future__ import annotations

import pytest
from aiohttp import web
from waiting import until

from areal_tasks.engines.client import BadRequest
from areal_tasks.engines.handover import read_store
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, run, serving

URI = "s3://bucket/store/r/weights/w.json"


class Blind(Fake):
    """Sees no folder of this machine; as SGLang 0.5.17 answers."""

    async def update(self, request: web.Request) -> web.Response:
        message = "Failed to get weights iterator: Repo id must be in the form 'repo_name'."
        return web.json_response({"success": False, "message": message}, status=400)


def test_sglang_fetches_before_it_stops_to_load() -> None:
    async def test() -> None:
        fakes = Fake(), Fake()
        async with serving(*fakes, engine="sglang") as client:
            assert len(await client.update_weights(URI, 1)) == 2
            assert all(fake.fetches == fake.updates == [URI] for fake in fakes)
            await client.update_weights("/a/folder", 2)
            assert all(fake.fetches == [URI] for fake in fakes)

    run(test)


@pytest.mark.parametrize(
    ("stores", "expected"),
    [(("s3://a", "s3://a"), True), (("s3://a", ""), False), (("s3://b", "s3://a"), False), ((), False)],
)
def test_servers_of_others_are_asked_whether_they_read_the_store(stores: tuple[str, ...], expected: bool) -> None:
    async def test() -> None:
        fakes = [Fake() for _ in stores]
        for fake, store in zip(fakes, stores, strict=True):
            fake.store = store
        async with serving(*fakes, engine="sglang") as client:
            assert await client.read("s3://a") is expected

    run(test)


def test_one_that_does_not_answer_is_not_counted() -> None:
    async def test() -> None:
        fakes = Fake(), Fake()
        fakes[0].store = "s3://a"
        async with serving(*fakes, engine="sglang") as client:
            client.servers[1].url = "http://127.0.0.1:9"
            assert await client.read("s3://a")

    run(test)


def test_a_server_that_does_not_see_the_folder_is_named_with_the_remedy() -> None:
    async def test() -> None:
        blind = Blind()
        async with serving(engine="sglang") as client, serving(blind):
            await client.use_external([blind.url])
            await until(lambda: len(client.healthy()) == 1)
            with pytest.raises(BadRequest, match=r"weights iterator.*/a/folder of .*engines\.sglang\.child`.*s3://"):
                await client.update_weights("/a/folder", 1)

    run(test)


def test_who_reads_the_store_without_being_asked() -> None:
    remote = ["launcher.type=slurm", "launcher.network=10.0.0.0/24"]
    assert read_store(load_recipe("quickstart"), [])
    assert not read_store(load_recipe("gsm8k"), [])
    assert read_store(load_recipe("gsm8k", remote), [])
    assert not read_store(load_recipe("gsm8k", remote), ["http://10.0.0.7:30000"])
