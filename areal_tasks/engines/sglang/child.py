"""`python -m areal_tasks.engines.sglang.child FLAGS`: `sglang.launch_server` behind the service's bearer token.

SGLang takes a key on its command line only, where every user of the machine can read it, and prints it into its log.
So its application gets our own check instead: SGLang never learns the token. (Its processes import this module again
when they start, so it imports nothing heavy at the top.)
"""

from __future__ import annotations

import os
import sys

GUARD = "AREAL_GUARD_PID"


def main() -> None:
    from areal_tasks.engines.sglang.family import die_with_parent

    die_with_parent(int(os.environ.pop(GUARD)))
    from areal_tasks.engines.service import TOKEN, BearerAuth

    token = os.environ.pop(TOKEN)
    from sglang.launch_server import run_server  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found,unused-ignore]

    load_plugins()
    settings = prepare_server_args(sys.argv[1:])
    from sglang.srt.entrypoints.http_server import app  # type: ignore[import-not-found,unused-ignore]

    app.add_middleware(BearerAuth, token=token)
    run_server(settings)


if __name__ == "__main__":
    main()
