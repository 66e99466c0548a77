"""The resources that services need, and a proposal where they fit on the machines of a cluster.

The proposal is first fit, in the order of starts; the cluster system decides in the end. It names the services that
would wait, with the reason, and those that can never run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from areal_tasks.engines.service import part_name
from areal_tasks.engines.starting import evaluator_names, trainer_names, worker_names
from areal_tasks.launchers.cluster import Machine, Resources
from schemas.recipe.launcher import Needs
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe


def service_needs(recipe: Recipe, external: bool) -> dict[str, Resources]:
    """What each service of a recipe needs, in the order in which they start. `external` servers run already."""
    found: dict[str, Resources] = {}
    if not isinstance(recipe, EvaluateRecipe):
        found |= dict.fromkeys(trainer_names(recipe), trainer_needs(recipe))
    found |= dict.fromkeys(worker_names(recipe), worker_needs(recipe))
    if not isinstance(recipe, SftRecipe) and not external:
        nodes, needs = range(recipe.inference.nodes), server_needs(recipe)
        found |= {part_name(f"inference-{i}", n): needs for i in range(recipe.inference.servers) for n in nodes}
    return found | dict.fromkeys(evaluator_names(recipe), worker_needs(recipe))


def trainer_needs(recipe: RlhfRecipe | SftRecipe) -> Resources:
    """The needs on each of its machines: a GPU per rank there; none for a model in float32, as in recipes for CPUs.

    At least a CPU per rank, too: Slurm gives a task no more than it asks for, and ranks that share one take turns.
    """
    ranks, on_cpus = recipe.trainer.ranks // recipe.trainer.nodes, recipe.model.dtype == "float32"
    needs = _needs(recipe.launcher.resources.trainer, 0 if on_cpus else ranks)
    return replace(needs, cpus=max(needs.cpus, ranks))


def server_needs(recipe: RlhfRecipe | EvaluateRecipe) -> Resources:
    """The needs of a server on each of its machines: a GPU per part of the model there; none if it is embedded."""
    asked = recipe.inference
    gpus = 0 if asked.engine == "embedded" else asked.tensor_parallel // asked.nodes
    return _needs(recipe.launcher.resources.inference, gpus)


def worker_needs(recipe: Recipe) -> Resources:
    return _needs(recipe.launcher.resources.rollout, 0)


def _needs(stated: Needs, gpus: int) -> Resources:
    return Resources(stated.cpus, gpus if stated.gpus < 0 else stated.gpus, stated.memory_mb)


#: Fields of Resources, the scarcest first, and how a message names them.
KINDS: Final = {"gpus": "GPUs", "cpus": "CPUs", "memory_mb": "MB of memory"}
#: The remedies if a service needs more than a machine has, where other fields than `launcher.resources` decide, too.
REMEDIES: Final = {
    ("trainer", "gpus"): "lower trainer.ranks, raise trainer.nodes, or set launcher.resources.trainer.gpus",
    ("trainer", "cpus"): "lower launcher.resources.trainer.cpus or trainer.ranks, or raise trainer.nodes",
    ("inference", "gpus"): "lower inference.tensor_parallel, raise inference.nodes, or set "
    "launcher.resources.inference.gpus",
}
#: The remedy if all services together need more than all machines have.
FEWER: Final = (
    "lower inference.servers, inference.tensor_parallel, rollout.workers, trainer.ranks or launcher.resources, or add "
    "a machine"
)

State = Literal["fits", "waits", "refused"]


@dataclass(frozen=True)
class Proposal:
    """Where a service fits now, or why it fits nowhere."""

    service: str
    needs: Resources
    state: State
    machine: str = ""
    why: str = ""


def propose(asked: Mapping[str, Resources], machines: Sequence[Machine], autoscales: bool = False) -> list[Proposal]:
    """A proposal for each service of `asked`. `autoscales`: the cluster adds machines as they are needed."""
    able = {machine.name: machine.free for machine in machines if not machine.state}
    crowded = not autoscales and not _fit_together(asked.values(), machines)
    found = []
    for service, needs in asked.items():
        if (name := _first(needs, able)) is not None:
            able[name] -= needs
            found.append(Proposal(service, needs, "fits", name))
        else:
            left = {machine.name: able.get(machine.name, machine.free) for machine in machines}
            found.append(_unplaced(service, needs, machines, left, autoscales, crowded))
    return found


def _unplaced(
    service: str,
    needs: Resources,
    machines: Sequence[Machine],
    left: Mapping[str, Resources],
    autoscales: bool,
    crowded: bool,
) -> Proposal:
    """The proposal for a service for which no machine has room. `left`: what the services before it leave free."""
    large = [machine for machine in machines if not _lacking(needs, machine.total)]
    if large:
        best = min(large, key=lambda machine: (bool(machine.state), len(_lacking(needs, left[machine.name]))))
        why = _shortage(needs, best, left[best.name])
        if crowded:
            return Proposal(service, needs, "refused", why=f"no room even if nothing else ran: {why}; {FEWER}")
        return Proposal(service, needs, "waits", why=why)
    why = _too_large(needs, machines)
    if autoscales:
        return Proposal(service, needs, "waits", why=f"{why}: the autoscaler has to add a larger one")
    return Proposal(service, needs, "refused", why=f"{why}: {_remedy(service, needs, machines)}")


def _shortage(needs: Resources, machine: Machine, left: Resources) -> str:
    """`needs 8 GPUs on one node; n3 has 8, 5 of them in use (3 by this run)`."""
    if machine.state:
        return f"needs {_amounts(needs, KINDS)} on one node; {machine.name} has as much, but is {machine.state}"
    lacking, parts = _lacking(needs, left), []
    for kind in lacking:
        total, own = getattr(machine.total, kind), getattr(machine.free, kind) - getattr(left, kind)
        by = f" ({own} by this run)" if own else ""
        parts.append(f"{_amount(total, kind)}, {total - getattr(left, kind)} of them in use{by}")
    return f"needs {_amounts(needs, lacking)} on one node; {machine.name} has {' and '.join(parts)}"


def _too_large(needs: Resources, machines: Sequence[Machine]) -> str:
    """`no node has 8 GPUs; the largest has 4`."""
    if not machines:
        return "the cluster has no node that may run it"
    most = _most(machines)
    if lacking := _lacking(needs, most):
        return f"no node has {_amounts(needs, lacking)}; the largest has {_amounts(most, lacking)}"
    return f"no node has {_amounts(needs, KINDS)} together"


def _remedy(service: str, needs: Resources, machines: Sequence[Machine]) -> str:
    part = service.partition("-")[0]
    lacking = _lacking(needs, _most(machines)) or [kind for kind in KINDS if getattr(needs, kind)]
    return "; ".join(REMEDIES.get((part, kind), f"lower launcher.resources.{part}.{kind}") for kind in lacking)


def _fit_together(asked: Iterable[Resources], machines: Sequence[Machine]) -> bool:
    """Whether all that fit a machine alone also fit together on empty machines, placed in order of size."""
    empty = {machine.name: machine.total for machine in machines}
    alone = [needs for needs in asked if _first(needs, empty) is not None]
    for needs in sorted(alone, key=lambda needs: [getattr(needs, kind) for kind in KINDS], reverse=True):
        if (name := _first(needs, empty)) is None:
            return False
        empty[name] -= needs
    return True


def _first(needs: Resources, free: Mapping[str, Resources]) -> str | None:
    return next((name for name, left in free.items() if not _lacking(needs, left)), None)


def _lacking(needs: Resources, left: Resources) -> list[str]:
    """The kinds of which there is too little. A need of 0 is always met, even if `left` is negative."""
    return [kind for kind in KINDS if getattr(needs, kind) > max(0, getattr(left, kind))]


def _most(machines: Sequence[Machine]) -> Resources:
    """The most of each kind that any machine has."""
    return Resources(**{kind: max((getattr(m.total, kind) for m in machines), default=0) for kind in KINDS})


def _amounts(resources: Resources, kinds: Iterable[str]) -> str:
    """`8 GPUs, 4 CPUs`: of these kinds, without those of which there is nothing."""
    some = [_amount(getattr(resources, kind), kind) for kind in kinds if getattr(resources, kind)]
    return ", ".join(some) or "none"


def _amount(number: int, kind: str) -> str:
    return f"{number} {KINDS[kind].removesuffix('s') if number == 1 else KINDS[kind]}"
