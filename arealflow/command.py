"""The `arealflow` command. First checks that arealflow's packages are not hidden, else it could not report errors."""

from __future__ import annotations

import sys

from arealflow.packages import check_packages


def main() -> None:
    """Entry point."""
    try:
        check_packages()
    except ImportError as error:
        sys.exit(f"error: {error}")
    from flows import ending
    from flows.cli.main import main as command

    ending.exits = True
    command()


if __name__ == "__main__":
    main()
