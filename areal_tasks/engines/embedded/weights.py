"""Where a server's weights come from: a local folder, or a weights manifest of the run's store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_tasks.engines.ends import Detokenizer
from areal_tasks.engines.models import load_tokenizer
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import read_record
from areal_tasks.store.objects.files import materialise
from schemas.errors import UserError
from schemas.manifest import WeightsManifest


@contextmanager
def weights_folder(store: Store, source: str) -> Iterator[Path]:
    """A local folder with the files of `source`: itself, or what a weights manifest in `store` (its URL) names."""
    stem = store.uri("x")[:-1]
    if "://" in source and not source.startswith(stem):
        raise UserError(f"{source} is not in this server's store ({store.url}); publish the weights there")
    if not source.startswith(stem) or Path(source).is_dir():
        yield Path(source)
        return
    manifest = read_record(store, source.removeprefix(stem), WeightsManifest)
    with TemporaryDirectory(prefix="arealflow-weights-") as scratch:
        yield materialise(store, manifest.files, Path(scratch), verify=True)


def find_detokenizer(folder: Path) -> Detokenizer | None:
    """The folder's tokenizer; None if it has none, in which case answers hold no text."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return Detokenizer(load_tokenizer(folder)) if any((folder / n).is_file() for n in names) else None
