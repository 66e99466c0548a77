"""The nodes of a Slurm cluster or allocation, and what of them is free, from what Slurm's commands print.

What `launcher.slurm.constraint` and `options` exclude is not left out: only Slurm knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import sub
from typing import Final

from areal_tasks.launchers.cluster import Machine, Resources

#: Runs a command of Slurm; returns what it prints.
Ask = Callable[[Sequence[str]], str]
COLUMNS: Final = (
    "NodeHost:|,PartitionName:|,CPUsState:|,Memory:|,AllocMem:|,Gres:|,GresUsed:|,StateCompact:|,Partition:|"
)
#: States of a node that takes jobs, if there is room.
ABLE: Final = frozenset({"idle", "mix", "alloc", "comp"})


def partition_nodes(ask: Ask, partition: str) -> list[Machine]:
    """The nodes of a partition; of the default one if it is not named, and of all if there is none."""
    rows = [line.split("|") for line in ask(["sinfo", "--noheader", "--Node", f"--Format={COLUMNS}"]).splitlines()]
    default = [row for row in rows if row[8].endswith("*")]
    chosen = [row for row in rows if row[1] in partition.split(",")] if partition else default or rows
    found: dict[str, Machine] = {}
    for name, _, cpus, memory, used_memory, gres, used_gres, state, *_ in chosen:
        _, idle, _, total = map(int, cpus.split("/"))
        has = Resources(total, gpus(gres), int(memory))
        free = has - Resources(total - idle, gpus(used_gres), int(used_memory))
        found[name] = Machine(name, has, free, "" if state in ABLE else f"in state {state}")
    return list(found.values())


def allocated_nodes(ask: Ask, job: str) -> list[Machine]:
    """What a job has of each of its nodes, less what its steps use."""
    details = ask(["scontrol", "--details", "--oneliner", "show", "job", job])
    steps = ask(["scontrol", "--oneliner", "show", "step", job]).splitlines()
    used = [(where, needs) for step in steps for where, needs in _step(ask, step)]
    return [
        Machine(name, share, reduce(sub, (needs for where, needs in used if where == name), share))
        for nodes, share in _shares(details)
        for name in _names(ask, nodes)
    ]


def _shares(details: str) -> Iterator[tuple[str, Resources]]:
    """`Nodes=n[1-2] CPU_IDs=0-3 Mem=3000 GRES=gpu:2(IDX:0-1)`: the same share of each of these nodes."""
    for nodes, cpus, memory, gres in re.findall(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", details):
        yield nodes, Resources(_count(cpus), gpus(gres), int(memory))


def _step(ask: Ask, line: str) -> Iterator[tuple[str, Resources]]:
    """What a step uses of its node. The job's own script, and a shell next to it, are no numbered steps."""
    found = re.search(r"\bStepId=\d+\.\d+ .*\bNodeList=(\S+) .*\bTRES=(\S+)", line)
    if found and "State=RUNNING" in line:
        amounts = dict(part.split("=") for part in found[2].split(",") if "=" in part)
        gpu, memory = amounts.get("gres/gpu", "0"), megabytes(amounts.get("mem", "0"))
        for name in _names(ask, found[1]):
            yield name, Resources(int(amounts.get("cpu", "0")), int(gpu), memory)


def _names(ask: Ask, nodes: str) -> list[str]:
    """`n[1-2]` as `n1`, `n2`."""
    return ask(["scontrol", "show", "hostnames", nodes]).split() if "[" in nodes else nodes.split(",")


def _count(ids: str) -> int:
    """How many `0-3,6` are."""
    spans = [part.split("-") for part in ids.split(",")]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)


def gpus(gres: str) -> int:
    """The GPUs in `gpu:2`, `gpu:a100:4(S:0-1),shard:8` or `(null)`."""
    return sum(map(int, re.findall(r"\bgpu:(?:[^,:()]+:)?(\d+)", gres)))


def megabytes(amount: str) -> int:
    """`500M`, `1.5G`."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    unit = amount[-1:]
    return int(float(amount[:-1]) * units[unit]) if unit in units else int(float(amount or 0))
