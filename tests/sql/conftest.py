"""What the tests of SQL share: small tables and runs of the store's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "store"))
