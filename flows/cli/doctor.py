"""`arealflow doctor`: what is installed, which features lack a package, and what can be reached."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.inventory import remove, remove_folders
from arealflow.packages import namesakes
from flows.cli.machine import DEFAULT_PORT, free_port
from flows.cli.output import AsJson, StoreUrl, show
from flows.cli.processes import asking, named_server
from flows.credentials import NEEDED, on_s3, read_prefect_keys, set_key_variables, set_keys
from flows.home import home
from schemas.errors import UserError

FEATURES = {
    "prefect": ("everything", ""),
    "torch": ("training and the embedded server", ""),
    "transformers": ("models and tokenizers", ""),
    "pyarrow": ("tables", ""),
    "botocore": ("stores at s3://", ""),
    "s3fs": ("data sources at s3://", ""),
    "duckdb": ("arealflow sql", ""),
    "math_verify": ("the math verifier", ""),
    "datasets": ("data sets by Hugging Face name", "pip install 'arealflow[datasets]'"),
    "sglang": ("inference.engine: sglang", "pip install 'arealflow[sglang]'"),
    "ray": ("launcher.type: ray", "pip install 'arealflow[ray]'"),
    "deepspeed": ("trainer.backend: deepspeed", "pip install 'arealflow[deepspeed]'"),
}


def doctor(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Check this machine. Exits with 1 if something that every run needs is not usable."""
    packages = [_package(module, *about) for module, about in FEATURES.items()]
    rows = [*packages, *same_names(), gpu(), server(), disk(), s3_keys(store), store_row(store)]
    show(rows, as_json, "arealflow doctor")
    if any(row["state"] == "BROKEN" for row in rows):
        raise typer.Exit(1)


def _package(module: str, purpose: str, remedy: str) -> dict[str, Any]:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # None: a folder of that name (namespace package)
        state = "not installed" if remedy else "BROKEN"
        return _row(module, state, f"needed for {purpose}: {remedy or 'install arealflow again'}")
    return _row(module, "ok", f"{importlib.metadata.version(module.replace('_', '-'))}, for {purpose}")


def same_names() -> list[dict[str, Any]]:
    """A row if packages of the current folder have the names of arealflow's."""
    found = ", ".join(f"{name}/" for name in namesakes(Path.cwd()))
    remedy = f"rename {found}: arealflow has packages of the same names (docs/guides/project.md)"
    return [_row("this folder", "note", remedy)] if found else []


def gpu() -> dict[str, Any]:
    """The names of the GPUs that torch finds; without any, the number of CPU cores."""
    import torch

    if not torch.cuda.is_available():
        return _row("GPU", "none", f"{os.cpu_count()} CPU cores; the embedded engine and the local trainer run on them")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return _row("GPU", "ok", ", ".join(names))


def server() -> dict[str, Any]:
    """The address of the Prefect server that commands use, or the port at which `arealflow up` would start one."""
    if api_url := named_server():
        from prefect.client.orchestration import get_client  # takes a second

        try:
            with asking(api_url), get_client(sync_client=True) as client:
                client.hello().raise_for_status()
        except UserError as error:
            return _row("Prefect server", "BROKEN", str(error))
        return _row("Prefect server", "ok", f"running at {api_url.removesuffix('/api')}")
    port = free_port(DEFAULT_PORT)
    return _row("Prefect server", "not running", f"`arealflow up` would start it on port {port}")


def disk() -> dict[str, Any]:
    folder = home() if home().exists() else home().parent
    free = shutil.disk_usage(folder).free / 2**30
    return _row("disk", "ok" if free > 2 else "BROKEN", f"{free:.0f} GiB free at {folder}")


def s3_keys(store: str) -> dict[str, Any]:
    """Where a flow run gets the keys of an S3 store from. Sets those that it would get from Prefect."""
    if found := set_key_variables():
        missing = [name for name in NEEDED if name not in found]
        return _row("S3 keys", "incomplete" if missing else "ok", f"from this environment: {', '.join(found)}")
    kept: dict[str, str] = {}
    try:
        if url := named_server():
            with asking(url):
                kept = read_prefect_keys()
    except UserError as error:
        return _row("S3 keys", "unknown", f"not in this environment, and Prefect's cannot be read: {error}")
    if not kept:
        return _row("S3 keys", "none", "for stores at s3://: export AWS_…, or `arealflow s3-keys` (docs/operate/s3.md)")
    if on_s3(store):
        set_keys(kept)
    return _row("S3 keys", "ok", "from Prefect's Secret block, for flow runs; other commands need AWS_… exported")


def store_row(url: str) -> dict[str, Any]:
    """Write a small object, read it back and remove it; it is in `_doctor/`, which cannot be the name of a run."""
    try:
        store = open_store(url)
        root, path = store.local(""), f"_doctor/{new_attempt()}"
        made = root is not None and not root.exists()
        store.create(path, b"ok")
        read = store.read(path)
        remove(store, [path])
        remove_folders(store, "" if made else "_doctor")
        if read != b"ok":
            raise UserError("what was written is not what was read")
    except UserError as error:
        return _row("store", "BROKEN", str(error))
    return _row("store", "ok", f"{store.url}: written, read and removed")


def _row(what: str, state: str, detail: str) -> dict[str, Any]:
    return {"what": what, "state": state, "detail": detail}
