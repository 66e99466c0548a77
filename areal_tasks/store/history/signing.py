"""The root hash of a run, one value that covers its recipes and every byte that its commits select; and its
signatures: Ed25519 (RFC 8032), so that the key that verifies cannot sign.

Prefect depends on `cryptography`, so it is installed. It is imported only when a key is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import bytes_digest, commit_once, new_attempt, read_folder
from areal_tasks.store.history.journal import append_log, current_user, log_digest, log_length, read_log
from areal_tasks.store.keys import combine_digests, digest_json
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.manifest import Signature

_ALGORITHM: Final = "Ed25519"
_MAKE: Final = "make one with `openssl genpkey -algorithm ed25519 -out key.pem`, or `ssh-keygen -t ed25519 -N ''`"


@dataclass(frozen=True)
class CheckedSignature:
    """A signature; why it is invalid for the store's present content (empty: valid); and whether its key is known."""

    signature: Signature
    problem: str = ""
    known: bool = False


def root_hash(run: Run, iterations: int) -> str:
    """SHA-256 over the last of the first `iterations` commits, and over `run.json` and the recipe segments until then.

    A commit has the digests of the one before it and, through manifests, of every file: it covers the whole history.
    Later records (more iterations, lines of the log, tags) do not change the root.

    Raises StoreError: one of these files is missing.
    """
    named = [*([run.commit_path(iterations - 1)] if iterations else []), *_records(run, iterations)]
    digests = parallel(lambda path: bytes_digest(run.store, path), named)
    return combine_digests(dict(zip(named, digests, strict=True)))


def _records(run: Run, iterations: int) -> Iterator[str]:
    yield paths.run_record(run.name)
    yield from (paths.segment(run.name, s.n) for s in run.segments if s.from_iteration < iterations)
    if run.parent is not None:
        yield from _records(run.parent, min(run.first, iterations))


def sign(store: Store, name: str, root: str, iterations: int, key_file: Path) -> tuple[Signature, bool]:
    """Sign the `root` that an audit of the run has just computed, and the present log, with a private key.

    Returns the signature, and whether it is new: a valid existing one by this key that covers everything is kept.

    Raises UserError: the file holds no Ed25519 key that can sign.
    """
    key, lines = _key(key_file, private=True), log_length(store, name)
    public = key.public_key().public_bytes_raw().hex()
    mine = [s for s in read_signatures(store, name) if (s.root, s.public_key) == (root, public)]
    newest = max(mine, key=lambda s: s.log_records, default=None)
    if newest and not unsigned_lines(store, name, newest) and not _problem(store, name, newest):
        return newest, False
    unsigned = Signature(
        root=root,
        iteration=iterations - 1,
        log=log_digest(store, name, lines),
        log_records=lines,
        algorithm=_ALGORITHM,
        public_key=public,
        signature="",
        attempt=new_attempt(),
        user=current_user(),
        provenance=make_provenance(0, now()),
    )
    signed = unsigned.model_copy(update={"signature": key.sign(_message(name, unsigned)).hex()})
    existing, new = commit_once(store, paths.signature(name, public[:16], f"{root[:16]}-{lines}"), signed)
    if new:
        append_log(store, name, "signed", {"root": root, "iteration": existing.iteration, "public_key": public})
    return existing, new


def unsigned_lines(store: Store, name: str, signature: Signature) -> int:
    """How many lines the log has that this signature does not cover; lines about signatures do not count."""
    return sum(line.action != "signed" for line in read_log(store, name, signature.log_records))


def verify(store: Store, name: str, key_file: Path | None = None) -> list[CheckedSignature]:
    """The signatures of a run, newest last, each checked by the public key that it names itself.

    Only `key_file` shows whether that key is trusted: signatures by the key in it are `known`.

    Raises UserError: the file holds no Ed25519 key, or none of the signatures is by it.
    """
    key: Any = _key(key_file, private=False) if key_file else None
    public = key.public_key() if hasattr(key, "public_key") else key
    known = public.public_bytes_raw().hex() if public else ""
    found = sorted(read_signatures(store, name), key=lambda s: (s.iteration, s.log_records))
    if known and all(s.public_key != known for s in found):
        raise UserError(f"Run {name!r} has no signature by the key in {key_file}: sign it with `audit --sign KEY`.")
    return [CheckedSignature(s, _problem(store, name, s), s.public_key == known) for s in found]


def read_signatures(store: Store, name: str) -> list[Signature]:
    return read_folder(store, f"{name}/signatures", Signature)


def _problem(store: Store, name: str, signature: Signature) -> str:
    """Why a signature does not hold; empty if it does."""
    if not _is_by_its_key(name, signature):
        return "it was not made with this key, or its content was altered"
    run, until = load_run(store, name), signature.iteration
    if until != -1 and not store.exists(run.commit_path(until)):
        return f"iteration {until} was signed and is gone: the history was cut"
    if root_hash(run, until + 1) != signature.root:
        return f"the history until iteration {until} is not the one that was signed"
    if signature.log_records and not store.exists(paths.log(name, signature.log_records)):
        return f"line {signature.log_records} of the log was signed and is gone: the log was cut"
    if log_digest(store, name, signature.log_records) != signature.log:
        return f"the first {signature.log_records} lines of the log are not those that were signed"
    return ""


def _is_by_its_key(name: str, signature: Signature) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        key.verify(bytes.fromhex(signature.signature), _message(name, signature))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(name: str, signature: Signature) -> bytes:
    signed = signature.model_dump(include={"root", "iteration", "log", "log_records", "algorithm", "public_key"})
    return f"arealflow run {digest_json({'run': name, **signed})}".encode()


def _key(file: Path, private: bool) -> Any:
    """The Ed25519 key in a PEM or OpenSSH file, which must be able to sign if `private`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as keys
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): name a key file, or {_MAKE}.") from error
    forms: list[Any] = [lambda: keys.load_pem_private_key(data, None), lambda: keys.load_ssh_private_key(data, None)]
    if not private:
        forms += [lambda: keys.load_pem_public_key(data), lambda: keys.load_ssh_public_key(data)]
    for load in forms:
        try:
            key = load()
        except TypeError as error:  # it is encrypted
            raise UserError(f"{file} is protected by a passphrase: name a key without one.") from error
        except (ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, Ed25519PrivateKey if private else Ed25519PrivateKey | Ed25519PublicKey):
            return key
    raise UserError(f"{file} holds no {'private ' if private else ''}Ed25519 key: {_MAKE}.")
