"""The section `launcher` of a recipe: where services run, and what they need there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.recipe.fields import Section, operational, section


class Needs(Section):
    """What one service needs of its machine."""

    cpus: int = operational(
        1, ge=1, le=4096, description="CPU cores; of the trainer, at least one for each rank there."
    )
    gpus: int = operational(
        -1,
        ge=-1,
        le=64,
        description="GPUs; -1: one for each rank, none with `model.dtype` float32; of a server, one for each "
        "tensor-parallel part, none for `embedded`.",
    )
    memory_mb: int = operational(0, ge=0, le=10**8, description="Memory; 0: not stated.")


class Resources(Section):
    """What services need of their machine."""

    trainer: Needs = section(Needs, "The trainer, on each of its machines: all ranks there together.")
    inference: Needs = section(Needs, "Each inference server.")
    rollout: Needs = section(
        Needs, "Each rollout worker. With η > 0 it verifies groups as they finish if it has `reward.workers` CPUs."
    )


class RaySettings(Section):
    """What only Ray needs to know; its cluster is at `RAY_ADDRESS`."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = operational(
        {},
        description="Resources that each service occupies of its node besides `launcher.resources`, so that it runs "
        "only where they are: `accelerator_type:H100: 0.001`, or those of `ray start --resources`.",
    )
    autoscaling: bool = operational(
        False, description="Wait for a node that is large enough, instead of refusing what no node can run."
    )


class Slurm(Section):
    """Options of `sbatch`. Inside an allocation, which has been given the others, `container`, `options`, `setup`."""

    partition: str = operational("", description="As `--partition`; empty: the cluster's default.")
    account: str = operational("", description="As `--account`.")
    qos: str = operational("", description="As `--qos`.")
    time: str = operational(
        "",
        pattern=r"^(\d+(-\d+)?(:\d+){0,2})?$",
        description="As `--time`: how long a service may run, such as `1-12:00:00`, or `12:00:00` in quotes (YAML "
        "takes it for a number); it is started again afterwards.",
    )
    constraint: str = operational("", description="As `--constraint`: features of the nodes.")
    container: str = operational("", description="As `--container`: an OCI bundle in which services run.")
    options: list[str] = operational([], description="Further options of sbatch or srun: `[--exclude=node7]`.")
    setup: str = operational(
        "", description="Shell commands on the node before a service starts, such as `module load cuda`."
    )


class Launcher(Section):
    """Where services run."""

    type: str = operational(
        "local",
        pattern=r"^(local|inline|slurm|ray|[\w.]+:\w+)$",
        description="`local`: processes of this machine; `inline`: threads of this process, for a debugger; `slurm`, "
        "`ray`: processes of machines that the cluster system finds; or your own, as `package.module:object`.",
    )
    network: str = operational(
        "",
        description="On several machines: the network in which services listen, such as `10.0.0.0/24`; each uses its "
        "machine's address there, and no other.",
    )
    trust_network: bool = operational(
        False,
        description="Let services send unencrypted what cannot be encrypted, in `network`: rows, gradients and weights "
        "between the machines of a trainer (`trainer.nodes`), prompts between those of a server (`inference.nodes`), "
        "and weights by `inference.transport: nccl`.",
        live=True,
    )
    lease_seconds: float = operational(
        35.0,
        ge=5,
        le=3600,
        description="On several machines: seconds after which a service that has lost its flow ends, and a flow counts "
        "a service that does not answer as ended.",
    )
    resources: Resources = section(Resources, "What services need of their machine, for `slurm`, `ray` and your own.")
    slurm: Slurm = section(Slurm, "How Slurm runs services.")
    startup_seconds: float = operational(
        180.0, gt=0, le=86400, description="Time limit for a service to become ready.", live=True
    )
    queue_seconds: float = operational(
        604800.0,
        gt=0,
        le=31536000,
        description="Time limit for the cluster system to give a service a machine.",
        live=True,
    )
    restarts: int = operational(
        3,
        ge=0,
        le=1000,
        description="Restarts of a failed service, without a commit in between, before the run stops; one of several "
        "inference servers is left out instead. Ends of rollout workers that have groups in flight do not count.",
        live=True,
    )
    warn_seconds: float = operational(
        60.0,
        gt=0,
        le=86400,
        description="Seconds without progress after which the log names what is waited for, then at doubled intervals.",
        live=True,
    )
    hang_seconds: float = operational(
        600.0,
        gt=0,
        le=86400,
        description="Seconds without progress after which a service is ended and restarted.",
        live=True,
    )
    store_seconds: float = operational(
        3600.0,
        gt=0,
        le=604800,
        description="Seconds after which an operation that the store has not answered, as on a disk that hangs, ends "
        "the flow's process; it is then started again like one that has crashed.",
        live=True,
    )
    ray: RaySettings = section(RaySettings, "Services on a Ray cluster.")
