"""`python -m areal_tasks.rollout.worker`: a rollout worker. Without a supervisor it writes finished groups and ends."""

from areal_tasks.engines.lifeline import farewell, watch_lifeline
from areal_tasks.garbage import importing

if __name__ == "__main__":
    watch_lifeline(farewell)
    with importing():
        from areal_tasks.rollout.worker.process import main

    main()
