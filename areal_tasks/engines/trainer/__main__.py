"""`python -m areal_tasks.engines.trainer`: the trainer, which ends with its supervisor, also during startup."""

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.importing import importing

if __name__ == "__main__":
    watch_lifeline()
    with importing():
        from areal_tasks.engines.trainer.process import main  # imports torch, for seconds

    main()
