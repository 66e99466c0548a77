"""Laws are checked without a deadline for one example: the first call of a torch operation may be slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("algorithms", deadline=None, max_examples=60)
settings.load_profile("algorithms")
