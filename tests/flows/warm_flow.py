"""The flow `rlhf` as a worker runs it, with services that are forked from a process that has imported torch."""

import warm_processes

from flows.rlhf import rlhf

__all__ = ["rlhf"]

warm_processes.install()
