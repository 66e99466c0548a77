"""The HTTP API, through a real server process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import LIMIT, wait_until
from warm_processes import Popen

from areal_tasks.engines.embedded.process import main
from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.service import SPEC, ServiceSpec
from areal_tasks.secret import TOKEN
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import new_attempt, read_record
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import service, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.manifest import ServiceRecord, WeightsRef
from tests.inference.helpers import MAX_LENGTH

PROMPT = [3, 4, 5, 13, 6, 14]


@dataclass
class Process:
    """A server process, its client, and the weights of its store."""

    process: Popen
    lifeline: int
    http: httpx.Client
    store: Store
    refs: list[WeightsRef]

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def generate(self, **body: Any) -> Any:
        """The answer, and the list of answers if there are `input_ids`."""
        answer = self.post("/generate", **{"input_ids": [PROMPT], "return_logprob": True} | body)
        assert answer.status_code == 200, answer.text
        return answer.json() if "input_ids" in body else answer.json()[0]

    def uri(self, version: int) -> str:
        return self.store.uri(self.refs[version].path)


def publish(store: Store, folder: Path, version: int) -> WeightsRef:
    attempt = new_attempt()
    files = upload(store, weights_attempt("r", version, attempt), folder)
    return commit_weights(store, "r", version, attempt, "weights", files, make_provenance(1, now()))


def make_spec(store: Store, weights: WeightsRef | None, slots: int) -> ServiceSpec:
    recipe = {"model": {"max_length": MAX_LENGTH}, "inference": {"slots": slots, "threads": 1}}
    return ServiceSpec(name="s", restart=0, store_url=store.url, run="r", owner=1, recipe=recipe, weights=weights)


def start(store: Store, weights: WeightsRef, slots: int = 8) -> tuple[Popen, int]:
    read, write = os.pipe()
    environment = os.environ | {
        SPEC: make_spec(store, weights, slots).model_dump_json(),
        TOKEN: "secret",
        LIFELINE: str(read),
    }
    command = [sys.executable, "-m", "areal_tasks.engines.embedded"]
    process = Popen(command, env=environment, pass_fds=[read], start_new_session=True, stderr=subprocess.DEVNULL)
    os.close(read)
    return process, write


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, other_folder: Path) -> Iterator[Process]:
    store = open_store(f"file://{tmp_path_factory.mktemp('store')}")
    refs = [publish(store, folder, v) for v, folder in enumerate((model_folder, other_folder))]
    process, lifeline = start(store, refs[0])
    path = service("r", 1, "s", 0)
    wait_until(lambda: store.exists(path) or process.poll() is not None, "the server")
    url = read_record(store, path, ServiceRecord).url
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=LIMIT) as http:
        yield Process(process, lifeline, http, store, refs)
    if process.poll() is None:
        process.kill()
    process.wait()


def test_nothing_is_served_without_the_token(server: Process) -> None:
    bare = httpx.Client(base_url=server.http.base_url, timeout=LIMIT)
    assert bare.get("/model_info").status_code == 401
    assert bare.post("/generate", json={"input_ids": [PROMPT]}).status_code == 401


def test_one_prompt_gets_one_answer(server: Process) -> None:
    answer = server.generate(sampling_params={"max_new_tokens": 6, "sampling_seed": 1})
    meta = answer["meta_info"]
    assert meta["weight_version"] == "0"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(answer["output_ids"]))
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in meta["output_token_logprobs"])
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert len(answer["text"]) <= 6


def test_a_list_gets_a_list_in_order(server: Process) -> None:
    params = [{"max_new_tokens": 3, "sampling_seed": 1}, {"max_new_tokens": 5, "sampling_seed": 1}]
    answers = server.generate(input_ids=[PROMPT, [9, 9]], sampling_params=params)
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [len(PROMPT), 2]
    alone = server.generate(sampling_params={"max_new_tokens": 3, "sampling_seed": 1})
    assert answers[0]["meta_info"]["output_token_logprobs"] == alone["meta_info"]["output_token_logprobs"]


def test_a_text_holds_the_stop_string_that_ends_it(server: Process) -> None:
    params = {"max_new_tokens": 60, "sampling_seed": 4, "ignore_eos": True}
    free = server.generate(sampling_params=params)["text"]
    stop = free[10:12]
    kept = server.generate(sampling_params=params | {"stop": [stop], "no_stop_trim": True})
    assert kept["text"] == free[: free.index(stop) + 2]
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [[3], []]}, "prompt 1 is empty"),
        ({"input_ids": [[3] * MAX_LENGTH]}, f"has {MAX_LENGTH} tokens; the context holds {MAX_LENGTH}"),
        ({"input_ids": [[3, 10_000]]}, "token id 10000; the vocabulary ends at"),
        ({"input_ids": [3, -1]}, "greater than or equal to 0"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": [3], "sampling_params": {"top_p": 0.9}}, "top_p"),
        ({"input_ids": [3], "sampling_params": {"top_k": 5}}, "top_k"),
        ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [3], "sampling_params": {"stop": [""]}}, "at least 1 character"),
        ({"input_ids": [[3]], "sampling_params": [{}, {}]}, "sampling_params has 2 elements for 1 prompts"),
        ({"input_ids": [[3, 4]], "logprob_start_len": [0, 0]}, "logprob_start_len has 2 elements for 1 prompts"),
        ({"input_ids": [[3, 4]], "logprob_start_len": [1]}, "no token after it is left to score"),
        ({"input_ids": [[3, 4]], "logprob_start_len": [0]}, "needs temperature 1 and ignore_eos"),
        ({"input_ids": [[3]], "stream": True}, "with stream one prompt"),
        ({"input_ids": [3]}, "with stream one prompt"),
        ({"input_ids": [3], "temprature": 1}, "temprature: Extra inputs"),
        ({}, "input_ids: Field required"),
    ],
)
def test_bad_requests_are_told_why(server: Process, body: dict[str, Any], reason: str) -> None:
    answer = server.post("/generate", **body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_a_body_that_is_no_json_is_told_so(server: Process) -> None:
    answer = server.http.post("/generate", content=b"{nope")
    assert (answer.status_code, "not JSON" in answer.json()["error"]) == (400, True)


def busy(server: Process) -> int:
    info = server.http.get("/server_info").json()
    return int(info["running"] + info["queued"])


class Background:
    """A request in a thread of its own."""

    def __init__(self, server: Process, **body: Any) -> None:
        self.answer: Any = None
        self.thread = threading.Thread(target=lambda: setattr(self, "answer", server.generate(**body)))
        self.thread.start()

    def result(self) -> Any:
        self.thread.join(LIMIT)
        assert self.answer is not None
        return self.answer


LONG = {"max_new_tokens": 1000, "ignore_eos": True, "sampling_seed": 3}


def test_pause_holds_and_continue_releases(server: Process) -> None:
    assert server.post("/pause_generation", mode="in_place").status_code == 200
    held = Background(server, sampling_params=LONG)
    wait_until(lambda: busy(server) == 1)
    steps = server.http.get("/server_info").json()["steps"]
    for _ in range(3):  # what changes nothing has the engine go round its loop
        assert server.post("/pause_generation", mode="in_place").status_code == 200
    assert server.http.get("/server_info").json()["steps"] == steps
    assert server.http.get("/health_generate").status_code == 200
    assert server.post("/continue_generation").status_code == 200
    assert held.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_a_long_queue_is_no_illness(server: Process) -> None:
    work = Background(server, sampling_params=LONG, input_ids=[PROMPT] * 256)
    wait_until(lambda: busy(server) > 8)
    assert server.http.get("/health_generate").status_code == 200
    assert busy(server) > 8, "it did not wait for its turn"
    server.post("/pause_generation", mode="abort")
    assert len(work.result()) == 256
    server.post("/continue_generation")


def test_a_client_that_goes_cancels_its_request(server: Process) -> None:
    server.post("/pause_generation", mode="in_place")
    body, soon = {"input_ids": [PROMPT], "sampling_params": LONG}, httpx.Timeout(LIMIT, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/generate", json=body, timeout=soon)
    wait_until(lambda: busy(server) == 0)
    server.post("/continue_generation")


def test_a_client_that_leaves_its_stream_frees_the_slot(server: Process) -> None:
    body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": True}
    server.post("/pause_generation", mode="in_place")
    with server.http.stream("POST", "/generate", json=body):
        wait_until(lambda: busy(server) == 1)
    wait_until(lambda: busy(server) == 0)
    server.post("/continue_generation")


def aborted_stream(server: Process) -> tuple[Any, str, str] | None:
    """The first event, the last one and what follows it; none where the abort came too late."""
    body = {"input_ids": PROMPT, "sampling_params": LONG, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert server.post("/pause_generation", mode="abort").status_code == 200
        *_, last, done = [first, *lines]
    server.post("/continue_generation")
    return (first, last, done) if '"abort"' in last else None


def test_a_stream_that_is_aborted_says_so(server: Process) -> None:
    first, last, done = wait_until(lambda: aborted_stream(server), "an abort before the end")
    answer = json.loads(last.removeprefix("data: "))
    assert first["meta_info"]["finish_reason"] is None and done == "data: [DONE]"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"][: len(first["output_ids"])] == first["output_ids"]


def test_weights_are_updated_from_a_manifest_or_a_folder(server: Process, model_folder: Path, tmp_path: Path) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    before = server.generate(sampling_params=greedy)
    answer = server.post("/update_weights_from_disk", model_path=server.uri(1), weight_version="1", flush_cache=True)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    after = server.generate(sampling_params=greedy)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "1"
    assert server.http.get("/model_info").json()["weight_version"] == "1"
    folder = server.uri(1).removesuffix(".json")  # of the store, whether or not a manifest names it
    assert server.post("/update_weights_from_disk", model_path=folder, weight_version="2").status_code == 200
    assert server.generate(sampling_params=greedy)["output_ids"] == after["output_ids"]
    server.post("/update_weights_from_disk", model_path=str(model_folder), weight_version=0)
    again = server.generate(sampling_params=greedy)
    assert again["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    assert again["meta_info"]["weight_version"] == "0"
    for wrong, reason in [
        (str(tmp_path), "no *.safetensors"),
        ("s3://elsewhere/weights.json", "not in this server's store"),
        (server.uri(1).replace(server.refs[1].attempt, "gone"), "gone"),
    ]:
        refused = server.post("/update_weights_from_disk", model_path=wrong, weight_version="2")
        assert refused.status_code == 400
        assert reason in refused.json()["error"]
    assert server.http.get("/model_info").json()["weight_version"] == "0"
    assert server.post("/update_weights_from_disk", model_path="x", flush_cache=False).status_code == 400


def test_it_tells_what_it_is(server: Process) -> None:
    info = server.http.get("/server_info").json()
    assert (info["deterministic"], info["paused"], info["running"]) == (True, False, 0)
    assert server.http.get("/health_generate").status_code == 200


def test_without_weights_it_says_so(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPEC, make_spec(server.store, None, 8).model_dump_json())
    with pytest.raises(SystemExit, match="error: the inference server was given no weights"):
        main()


def test_it_dies_with_its_lifeline(server: Process) -> None:
    os.close(server.lifeline)
    assert server.process.wait(LIMIT) != 0
