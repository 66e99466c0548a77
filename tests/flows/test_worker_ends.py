"""The worker ends when it is asked to, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys

from waiting import LIMIT

IGNORES_SIGINT = "trap '' INT; exec \"$@\""  # as a shell without job control starts what follows with `&`


def test_sigterm_ends_a_worker_that_was_started_in_the_background(api: str) -> None:
    command = ["sh", "-c", IGNORES_SIGINT, "sh", sys.executable, "-P", "-m", "flows.worker"]
    server = {"PREFECT_API_URL": api}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | server) as worker:
        assert worker.stdout is not None
        assert any("started!" in line for line in worker.stdout)
        worker.terminate()
        try:
            worker.wait(LIMIT)
        finally:
            worker.kill()
