"""`python -m areal_tasks.engines.embedded`: the inference server, which ends with its supervisor, also at startup."""

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.garbage import importing

if __name__ == "__main__":
    watch_lifeline()
    with importing():
        from areal_tasks.engines.embedded.process import main  # imports torch, for seconds

    main()
