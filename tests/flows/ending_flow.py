"""A process whose flow is over, and which has 500 events left for a Prefect server that is gone; after a line of input.

`python ending_flow.py ENDS`: ENDS is how the flow ends, `well` or `refused`.
"""

from __future__ import annotations

import sys

from prefect.events import emit_event

from flows import ending
from schemas.errors import UserError

ERRORS = {"refused": UserError("no such model")}


def emit() -> None:
    emit_event("happened", {"prefect.resource.id": "test"})


def main(ends: str) -> None:
    ending.exits = True
    ending.at_last.append(lambda: print("at last"))
    show = ending.Once(lambda result: print("made", result["run"]))
    emit()
    input()
    with ending.Reporting() as report:
        for _ in range(500):
            emit()
        if ends in ERRORS:
            raise ERRORS[ends]
        report({"run": "r"})
    show({"run": "r"})


if __name__ == "__main__":
    main(sys.argv[1])
