"""What SGLang's log says of its cache: servers are comparable if their caches have one size and neither was full."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def cache_of(*logs: Path) -> dict[str, Any]:
    """Tokens that the cache of the server started last holds, and how often requests were put back; None: not said."""
    said = [log.read_text(errors="replace") for log in sorted(logs) if log.exists()]
    sizes = [int(size) for text in said for size in re.findall(r"max_total_num_tokens=(\d+)", text)]
    full = sum(text.count("KV cache pool is full. Retract requests") for text in said)
    return {"cache_tokens": sizes[-1] if sizes else None, "retractions": full if sizes else None}
