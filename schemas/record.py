"""What every JSON file of the store is: a record of a schema version, and a seal over its bytes and its path.

Schema 2 added a seal to every file, the log, references to derived runs, tags, tombstones and signatures; schema 3 the
order of a run's prompts; schema 4 the spool, and the groups that an iteration took; schema 5 the path in the seal, and
the log in commits. Files of earlier schemas are read unchanged: every field that they lack has a default.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION: Final = 5
_SEALED: Final = 2  # the first schema whose records have a seal
#: The first schema whose seals cover the record's path, from the run's name on.
SEALED_PATH: Final = 5
_SEAL: Final = re.compile(rb'\A\{\n "seal": "([0-9a-f]{64})",\n')


class Record(BaseModel):
    """A JSON value of the store, or of a message between processes. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class StoredRecord(Record):
    """A JSON file of the store, written once.

    Its seal reveals any altered byte, and that it was written for another path, even if no other file has a digest.
    """

    schema_version: int = SCHEMA_VERSION

    def encode(self, path: str) -> bytes:
        """The bytes to store at `path` and to hash: for an earlier schema as its programs wrote them."""
        body = self.model_dump_json(indent=1, exclude_unset=self.schema_version < SCHEMA_VERSION).encode()
        if self.schema_version < _SEALED:
            return body
        return b'{\n "seal": "' + self._seal(body, path) + b'",\n' + body[2:]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The record in `data`. Does not check its seal."""
        return cls.model_validate_json(_unsealed(data))

    def seal_holds(self, data: bytes, path: str) -> bool:
        """Whether `data`, of which this record was parsed, matches its seal at `path`; only schema 1 needs none."""
        found = _SEAL.match(data)
        if found is None:
            return self.schema_version < _SEALED
        return self._seal(_unsealed(data), path) == found.group(1)

    def _seal(self, body: bytes, path: str) -> bytes:
        covered = f"{path}\n".encode() if self.schema_version >= SEALED_PATH else b""
        return hashlib.sha256(covered + body).hexdigest().encode()


def _unsealed(data: bytes) -> bytes:
    found = _SEAL.match(data)
    return data if found is None else b"{\n" + data[found.end() :]
