"""Where a run's initial weights come from: random initialisation, a local folder, the hub, or another run."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import find_reference, write_reference
from areal_tasks.store.objects.files import materialise, read_weights, upload
from areal_tasks.store.paths import run_record
from areal_tasks.store.reachable import written_weights
from areal_tasks.store.retention.tombstones import check_kept, check_run_kept
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError, first_line
from schemas.manifest import FileRef, IterationCommit, WeightsRef
from schemas.recipe.sections import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The files of a model's folder that are used: configuration, safetensors, tokenizer; no other formats of the weights.
WANTED: Final = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
#: Held while a model is built: transformers replaces functions of its classes meanwhile. Under `launcher.type: inline`
#: services build theirs in threads of one process.
BUILDING: Final = threading.Lock()
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_LONG_ROPES: Final = ("longrope", "su")  # its older name
_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


def initial_weights(
    store: Store, model: Model, seed: int, into: str, scratch: Path, reader: str = ""
) -> tuple[FileRef, ...]:
    """The files of version 0 in the store: written under the prefix `into`, or those that another run has committed.

    `scratch` is an empty local folder for files that are made or fetched first; `reader` is the run that begins with
    these weights. UserError says what is missing.
    """
    if model.path.startswith("run://"):
        return run_weights(store, model.path, reader)
    if model.scratch is not None:
        from areal_tasks.data.scratch import make_scratch  # imports torch, which checks of a recipe do not need

        return upload(store, into, make_scratch(model.scratch, seed, model.max_length, scratch / "model"))
    if not model.path:
        raise ValueError("model.warm_start should have been replaced by the model.path of the run that it names")
    folder = model_folder(model.path)
    check_context(folder, model.max_length)
    check_finite(folder)
    return upload(store, into, link_wanted(folder, scratch / "model"))


def run_weights(store: Store, path: str, reader: str = "") -> tuple[FileRef, ...]:
    """The files of the newest (`run://NAME`) or of one version (`run://NAME@VERSION`, from 1) of a run's weights.

    The run `reader`, which begins with them, first writes a reference into that run, which then fixes the version.
    """
    name, _, version = path.removeprefix("run://").partition("@")
    if not store.exists(run_record(name)):
        raise UserError(f"model.path: there is no run '{name}' in {store.url}")
    run, earlier = load_run(store, name), find_reference(store, name, reader) if reader else None
    commit = _commit_of(run, int(version) if version else earlier.iteration if earlier else run.committed)
    if reader:
        write_reference(store, name, reader, commit.iteration + 1, "weights")
    ref = written_weights(run, commit)
    if not ref.written:
        raise UserError(
            f"model.path: '{path}' is version {ref.version}, which was sent to the servers and not written; "
            "name one that trainer.weights_every divides, or the last of a run that is complete"
        )
    for run_needed in {name, ref.path.split("/")[0]}:  # the files may belong to the run that it was forked from
        check_run_kept(store, run_needed)
    check_kept(store, ref)
    return read_weights(store, ref).files


def _commit_of(run: Run, version: int) -> IterationCommit:
    """The commit that made a version of the run's weights: the parent's, if the run was forked after that version."""
    newest = run.committed  # a version per committed iteration
    if newest == 0:
        raise UserError(
            f"model.path: run '{run.name}' has committed no iteration yet, so it has no weights to start from"
        )
    if version == 0:
        raise UserError(
            f"model.path: version 0 of run '{run.name}' is what that run began with; name that run's model.path instead"
        )
    if version > newest:
        raise UserError(f"model.path: run '{run.name}' has no version {version}; its newest is {newest}")
    return run.commit(version - 1)


# ── folders and names ───────────────────────────────────────────────────────────────────────────────────────────────


def model_folder(path: str) -> Path:
    """A local folder with a complete model: `path` itself, or a download from the hub. UserError if there is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _from_hub(path)
    _require(folder, path, ["config.json"], "no config.json: it is not a model's folder")
    _require(folder, path, ["*.safetensors"], "no *.safetensors: convert its weights with save_pretrained")
    _require(folder, path, _TOKENIZERS, "no tokenizer: save it there too (tokenizer.save_pretrained)")
    return folder


def check_model(store: Store, model: Model) -> None:
    """UserError if `model` names weights that are missing or incomplete. Does not ask the hub."""
    if model.path.startswith("run://"):
        run_weights(store, model.path)
    elif model.path and not _may_be_on_hub(model.path):
        check_context(model_folder(model.path), model.max_length)


def _may_be_on_hub(path: str) -> bool:
    """Whether `path` looks like a model's name, and neither it nor its parent is a local folder."""
    local = Path(path).expanduser().is_dir() or Path(path).parent.is_dir()
    return not local and bool(_NAME.fullmatch(path)) and not path.startswith(".")


def _require(folder: Path, path: str, patterns: Iterable[str], problem: str) -> None:
    if not any(next(folder.glob(pattern), None) for pattern in patterns):
        raise UserError(f"model.path: '{path}' has {problem}")


def _from_hub(path: str) -> Path:
    if not _may_be_on_hub(path):
        raise UserError(f"model.path: there is no folder '{path}' (looked for {Path(path).expanduser().absolute()})")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.path: '{path}' is no folder here (looked for {Path(path).absolute()}), and the hub gives no model "
            f"of that name: {first_line(error)}. Put the model's folder there, or name one that the hub has"
        ) from error


def link_wanted(folder: Path, into: Path) -> Path:
    """Make `into` a folder of links to those files of `folder` that engines read."""
    into.mkdir(parents=True, exist_ok=True)
    for file in _wanted(folder):
        (into / file.name).symlink_to(file.resolve())
    return into


def file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """Size in bytes and modification time in ns of each file of `folder` that engines read, by name."""
    states = {file.name: file.stat() for file in _wanted(folder)}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in sorted(states.items())}


def _wanted(folder: Path) -> set[Path]:
    return {file for pattern in WANTED for file in folder.glob(pattern)}


def check_context(folder: Path, max_length: int) -> None:
    """UserError if `max_length` tokens exceed the context length of the model in `folder`, or what one LongRoPE covers.

    With LongRoPE (arXiv:2402.13753) transformers and SGLang take the frequencies for long texts for all samples of a
    pass if one of them is long: logprobs of the short ones would depend on it.
    """
    config = json.loads((folder / "config.json").read_bytes())
    context = config.get("max_position_embeddings")
    if isinstance(context, int) and max_length > context:
        raise UserError(f"model.max_length: {max_length} exceeds the model's context of {context} tokens; lower it")
    if (short := min(_long_ropes(config), default=max_length)) < max_length:
        raise UserError(
            f"model.max_length: the model's LongRoPE has other frequencies beyond {short} tokens, which short samples "
            f"would get too, beside long ones; lower {max_length} to {short}, or use a model without LongRoPE"
        )


def _long_ropes(config: dict[str, Any], outer: int | None = None) -> Iterator[int]:
    """The numbers of tokens beyond which a configuration, or one in it, has the other frequencies of LongRoPE."""
    own = config.get("original_max_position_embeddings") or outer or config.get("max_position_embeddings")
    if isinstance(own, int) and config.get("rope_type", config.get("type")) in _LONG_ROPES:
        yield own
    for part in config.values():
        if isinstance(part, dict):
            yield from _long_ropes(part, own)


def vocabulary_of(folder: Path) -> int:
    """How many tokens the model in `folder` knows: ids from 0 up to this number, which the tokenizer may exceed."""
    from transformers import AutoConfig  # takes a second

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return int(config.get_text_config(decoder=True).vocab_size)


def check_finite(folder: Path) -> None:
    """UserError names a tensor of the weights in `folder` with a value that is not finite."""
    from safetensors import SafetensorError, safe_open  # checks of a recipe do not need it, nor torch

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                wrong = next((name for name in tensors.keys() if not _is_finite(tensors.get_tensor(name))), "")  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"model.path: {file} is damaged ({error}); get the files again") from error
        if wrong:
            raise UserError(
                f"model.path: the weights have values that are not finite, first in tensor {wrong} of {file.name}; get "
                "the files again, or name another model"
            )


def _is_finite(values: Any) -> bool:
    """Whether all values of a tensor are finite, if it is of a type that is trained. Reads it once, copies nothing."""
    import torch

    if not values.is_floating_point() or not values.numel():
        return True
    values = values.float() if values.dtype.itemsize == 1 else values  # of 8 bits torch finds no extremes
    return bool(torch.isfinite(torch.stack(values.aminmax())).all())  # both are NaN if a value is


def describing_files(store: Store, weights: WeightsRef, folder: Path) -> Path:
    """Fetch the files of a model into `folder`, except the safetensors. Returns the folder."""
    small = [file for file in read_weights(store, weights).files if not file.path.endswith(".safetensors")]
    return materialise(store, small, folder, verify=True)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder. UserError if there is none."""
    _require(folder, str(folder), _TOKENIZERS, "no tokenizer: save it there too (tokenizer.save_pretrained)")
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
