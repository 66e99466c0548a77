"""Signatures of a run's root hash: Ed25519 (RFC 8032), so that whoever verifies cannot sign.

Prefect depends on `cryptography`, which is therefore there. It is imported when a key is used and not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, new_attempt, read_record
from areal_tasks.store.journal import append, log_digest, log_length, read_log, user
from areal_tasks.store.keys import digest_json
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.root import root_hash
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.manifest import Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ALGORITHM: Final = "Ed25519"
_MAKE: Final = "make one with `openssl genpkey -algorithm ed25519 -out key.pem`, or `ssh-keygen -t ed25519 -N ''`"


@dataclass(frozen=True)
class Verified:
    """A signature by a key, and whether it holds for what the store has now."""

    signature: Signature
    problem: str = ""


def sign(store: Store, name: str, root: str, iterations: int, key_file: Path) -> tuple[Signature, bool]:
    """Vouch with a private key for a run whose audit has just given `root`, and for its log as it is now.

    Returns the signature, and whether it was made now: one by this key that holds and covers all there is stays.

    Raises:
        UserError: the file holds no Ed25519 key that can sign.
    """
    key, lines = _private_key(key_file), log_length(store, name)
    public = key.public_key().public_bytes_raw().hex()
    if there := _covering(store, name, root, key.public_key()):
        return there, False
    unsigned = Signature(
        root=root,
        iteration=iterations - 1,
        log=log_digest(store, name, lines),
        log_records=lines,
        algorithm=_ALGORITHM,
        public_key=public,
        signature="",
        attempt=new_attempt(),
        user=user(),
        provenance=make_provenance(0, now()),
    )
    signed = unsigned.model_copy(update={"signature": key.sign(_message(name, unsigned)).hex()})
    there, mine = commit_once(store, paths.signature(name, public[:16], f"{root[:16]}-{lines}"), signed)
    if mine:
        append(store, name, "signed", {"root": root, "iteration": there.iteration, "public_key": public})
    return there, mine


def _covering(store: Store, name: str, root: str, key: Ed25519PublicKey) -> Signature | None:
    """A signature of this root that holds, by this key, if nothing worth signing has been added to the log since."""
    mine = [s for s in read_signatures(store, name) if (s.root, s.public_key) == (root, key.public_bytes_raw().hex())]
    newest = max(mine, key=lambda s: s.log_records, default=None)
    covers = newest and not unsigned_lines(store, name, newest) and not _problem(store, name, newest, key)
    return newest if covers else None


def unsigned_lines(store: Store, name: str, signature: Signature) -> int:
    """How many lines the log has that this signature does not cover; those that tell of signatures do not count."""
    return sum(line.action != "signed" for line in read_log(store, name, signature.log_records))


def verify(store: Store, name: str, key_file: Path) -> list[Verified]:
    """The signatures of a run by this key, newest last, each checked against what the store has now.

    Raises:
        UserError: the file holds no Ed25519 key, or none of the signatures is by it.
    """
    key = _public_key(key_file)
    mine = [s for s in read_signatures(store, name) if s.public_key == key.public_bytes_raw().hex()]
    if not mine:
        raise UserError(f"Run {name!r} has no signature by the key in {key_file}: sign it with `audit --sign KEY`.")
    return [
        Verified(s, _problem(store, name, s, key)) for s in sorted(mine, key=lambda s: (s.iteration, s.log_records))
    ]


def read_signatures(store: Store, name: str) -> list[Signature]:
    """All signatures of a run, whoever made them."""
    names = [child for child in store.children(f"{name}/signatures") if child.endswith(".json")]
    return [read_record(store, f"{name}/signatures/{child}", Signature) for child in names]


def _problem(store: Store, name: str, signature: Signature, key: Ed25519PublicKey) -> str:
    """Why a signature does not hold; empty if it does."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature.signature), _message(name, signature))
    except (InvalidSignature, ValueError):
        return "it was not made with this key, or what it says was altered"
    if root_hash(load_run(store, name), signature.iteration + 1) != signature.root:
        return f"the history until iteration {signature.iteration} is not the one that was signed"
    if log_digest(store, name, signature.log_records) != signature.log:
        return f"the first {signature.log_records} lines of the log are not those that were signed"
    return ""


def _message(name: str, signature: Signature) -> bytes:
    said = signature.model_dump(include={"root", "iteration", "log", "log_records", "algorithm", "public_key"})
    return f"arealflow run {digest_json({'run': name, **said})}".encode()


def _private_key(file: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = _load(file, private=True)
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{file} holds no private Ed25519 key: {_MAKE}.")
    return key


def _public_key(file: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    key = _load(file, private=False)
    if isinstance(key, Ed25519PrivateKey):
        return key.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{file} holds no Ed25519 key: {_MAKE}.")
    return key


def _load(file: Path, private: bool) -> Any:
    """The key in a PEM or OpenSSH file, whatever kind it is; None if it holds none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as keys

    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): name a key's file, or {_MAKE}.") from error
    attempts: list[Any] = [lambda: keys.load_pem_private_key(data, None), lambda: keys.load_ssh_private_key(data, None)]
    if not private:
        attempts += [lambda: keys.load_pem_public_key(data), lambda: keys.load_ssh_public_key(data)]
    for attempt in attempts:
        try:
            return attempt()
        except TypeError as error:  # it is encrypted
            raise UserError(f"{file} is protected by a passphrase: name a key without one.") from error
        except (ValueError, UnsupportedAlgorithm):
            continue
    return None
