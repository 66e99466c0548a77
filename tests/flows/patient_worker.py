"""The worker of `arealflow up`, which gives a cancelled flow process as long as it takes to end."""

from waiting import LIMIT

import flows.worker

if __name__ == "__main__":
    flows.worker.CANCEL_SECONDS = LIMIT  # type: ignore[misc]
    flows.worker.main()
