"""A server that takes weights as SGLang does, by gloo or from the memory of another process.

`receiver.py TOKEN [ADDRESS]` prints its port.

Told to by `/fail`, it dies at the next weights, or answers 500 without taking them.

It joins through the very calls that SGLang 0.5.17 makes (`init_custom_process_group`), written out here, so that the
sender's way of joining is checked against them and not against itself.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

GROUPS: dict[str, Any] = {}
HELD: dict[str, Any] = {"version": "0", "tensors": {}, "fails": ""}


def join(address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size))
    wait = timedelta(seconds=200)
    prefixed = PrefixStore(name, store)
    group, _ = _new_process_group_helper(size, rank, [], Backend(backend), prefixed, group_name=name, timeout=wait)
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    GROUPS[name] = group


def receive(body: dict[str, Any]) -> None:
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, src=0, group=GROUPS[body["group_name"]])
        HELD["tensors"][name] = tensor.float().tolist()
    HELD["version"] = body["weight_version"]


def take(body: dict[str, Any]) -> None:
    """As SGLang's only rank: map the tensors and copy them. The names of shared memory tell which process made them."""
    data = base64.b64decode(body["serialized_named_tensors"][0])
    HELD["makers"] = sorted(set(re.findall(r"/torch_(\d+)_", data.decode(errors="ignore"))))
    HELD["tensors"] = {name: tensor.float().tolist() for name, tensor in pickle.loads(data)}
    HELD["version"], HELD["flushes"] = body["weight_version"], body["flush_cache"]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {sys.argv[1]}":
            self.answer(401, {"error": "token"})
        elif self.path == "/init_weights_update_group":
            names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
            join(*(body[n] for n in names))
            self.answer(200, {"success": True})
        elif self.path == "/destroy_weights_update_group":
            dist.destroy_process_group(GROUPS.pop(body["group_name"]))
            self.answer(200, {"success": True})
        elif self.path == "/fail":
            HELD["fails"] = body["how"]
            self.answer(200, {})
        elif HELD["fails"] == "dies":
            os._exit(1)
        elif HELD["fails"] == "500":
            self.answer(500, {"error": "out of order"})
        elif self.path == "/update_weights_from_tensor":
            take(body)
            self.answer(200, {"success": True})
        else:
            receive(body)
            self.answer(200, {"success": True})

    def do_GET(self) -> None:
        self.answer(200, HELD | {"groups": list(GROUPS)})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output short."""


if __name__ == "__main__":
    server = HTTPServer((sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
