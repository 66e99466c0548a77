"""Tags each token that SGLang samples with the weights version that sampled it, and keeps older weights' cache apart.

SGLang 0.5.17 reports one version per answer. With weights that change while requests run, tokens of one answer differ:
this plugin (SGLang's own mechanism: an entry point of the group `sglang.srt.plugins`, loaded in each of its processes)
adds a value per token to the answer's `meta_info`, by SGLang's `customized_info`. It holds the version, and whether the
token was sampled over keys and values (KV) of older weights. Requests reuse cached prefixes of their own version only.

Imported in SGLang's processes: standard library alone at the top.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

#: The value of a token in `meta_info`: 2 · version, plus 1 where it was sampled over KV of older weights.
TOKEN_TAGS: Final = "areal_token_tags"
GROUP: Final = "sglang.srt.plugins"
UPDATES: Final = ("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed")


def register() -> None:
    """Called by SGLang at the start of each of its processes."""
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found,unused-ignore]
        HookRegistry,
        HookType,
    )

    managers = "sglang.srt.managers"
    hooks = {
        f"{managers}.scheduler.Scheduler.run_batch": (tag_tokens, HookType.AFTER),
        f"{managers}.scheduler.Scheduler.handle_generate_request": (isolate_request, HookType.BEFORE),
        f"{managers}.schedule_batch.Req.reset_for_retract": (forget_cache, HookType.AFTER),
    }
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    hooks |= {f"{updater}.{update}": (note_update, HookType.AFTER) for update in UPDATES}
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)


def tag_tokens(result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After a forward pass has been launched: what it samples for each request is of the scheduler's version.

    The prompt's KV is of the version of the request's first pass: later passes of a chunked prompt only add newer KV.
    """
    output = getattr(result, "logits_output", None)
    if output is None:
        return
    version = version_of(scheduler)
    tags = [2 * version + (_cache_version(request, version) < version) for request in batch.reqs]
    output.customized_info = (output.customized_info or {}) | {TOKEN_TAGS: tags}


def isolate_request(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Before a request is queued: it may reuse the cached prefixes of the version in force only."""
    request.extra_key = cache_key(scheduler)


def note_update(result: Any, updater: Any, command: Any, *_: Any, **__: Any) -> None:
    """After new weights are in: requests that wait will compute, or reuse, the cache of the new version."""
    if not result.success or command.weight_version is None:
        return
    scheduler = updater.scheduler
    scheduler.areal_version = int(command.weight_version)
    for request in scheduler.waiting_queue:
        request.extra_key = cache_key(scheduler)


def forget_cache(result: Any, request: Any) -> None:
    """After a request has lost its cache: it is computed anew, with whatever weights are in force then."""
    request.areal_cache_version = None


def version_of(scheduler: Any) -> int:
    """The weights version in force; that of the start until the first update."""
    updated = getattr(scheduler, "areal_version", None)
    return int(scheduler.server_args.weight_version) if updated is None else int(updated)


def cache_key(scheduler: Any) -> str:
    """Names the cached prefixes of the version in force."""
    return f"version {version_of(scheduler)}"


def _cache_version(request: Any, version: int) -> int:
    """The oldest version of the request's cache; it begins with the pass that is launched now if it has none."""
    if getattr(request, "areal_cache_version", None) is None:
        request.areal_cache_version = version
    return int(request.areal_cache_version)


def decode_tags(tags: Iterable[int]) -> tuple[list[int], list[bool]]:
    """Versions of the tokens, and whether each was sampled over KV of older weights."""
    pairs = [divmod(tag, 2) for tag in tags]
    return [version for version, _ in pairs], [bool(stale) for _, stale in pairs]


def install(folder: Path) -> Path:
    """Make this module an installed plugin for processes that have `folder` on their path. Returns `folder`."""
    info = folder / "arealflow_sglang_plugin-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arealflow-sglang-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\narealflow = {__name__}:{register.__name__}\n")
    return folder
