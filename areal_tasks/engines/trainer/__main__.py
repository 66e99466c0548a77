"""`python -m areal_tasks.engines.trainer`: the trainer as a process."""

from __future__ import annotations

from areal_tasks.engines.service import read_spec, serve, watch_lifeline
from areal_tasks.engines.trainer.app import make_app


def main() -> None:
    watch_lifeline()
    spec = read_spec()
    serve(make_app(spec), spec)


if __name__ == "__main__":
    main()
