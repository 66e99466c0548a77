"""What every JSON file of the store is: a record of a schema version, and a seal over its bytes.

Schema 2 added a seal to every file, the log, references to derived runs, tags, tombstones and signatures; schema 3 the
order of a run's prompts; schema 4 the spool, and the groups that an iteration took. Files of earlier schemas are read
unchanged: every field that they lack has a default.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Final = 4
_SEAL: Final = re.compile(rb'\A\{\n "seal": "([0-9a-f]{64})",\n')


class Record(BaseModel):
    """A JSON value of the store, or of a message between processes. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class StoredRecord(Record):
    """A JSON file of the store, written once. Its seal reveals any altered byte, even if no other file has a digest."""

    schema_version: int = SCHEMA_VERSION

    def encode(self) -> bytes:
        """The bytes to store and hash: for an earlier schema as its programs wrote them; from schema 2 on sealed."""
        body = self.model_dump_json(indent=1, exclude_unset=self.schema_version < SCHEMA_VERSION).encode()
        if self.schema_version < 2:
            return body
        return b'{\n "seal": "' + _digest(body) + b'",\n' + body[2:]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The record in `data`. Does not check its seal."""
        return cls.model_validate_json(_unsealed(data))


def is_sealed(data: bytes) -> bool:
    """Whether `data` begins with a seal, as every file from schema 2 on does."""
    return _SEAL.match(data) is not None


def seal_holds(data: bytes) -> bool:
    """Whether the bytes of a file match its seal; False if it has none."""
    found = _SEAL.match(data)
    return found is not None and _digest(_unsealed(data)) == found.group(1)


def _unsealed(data: bytes) -> bytes:
    found = _SEAL.match(data)
    return data if found is None else b"{\n" + data[found.end() :]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
