"""Tasks on a Slurm cluster: jobs of `sbatch`, or steps of `srun` where the flow itself runs inside an allocation.

Slurm gets the task's environment by name, and no other variables of the flow, since it does not encrypt what it sends.
One `squeue` every few seconds reports the states of all jobs; unlike `sacct`, it needs no accounting.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_tasks.launchers.cluster import PREEMPTED, Cluster, ClusterUnreachable, Machine, Resources, Submitted, Task
from areal_tasks.launchers.slurm_nodes import allocated_nodes, partition_nodes
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher as Settings
from schemas.recipe.launcher import Slurm

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 5.0  # between two queries of all jobs
COMMAND_SECONDS: Final = 60.0
FLUSH_SECONDS: Final = 90  # so long before its time limit a job is asked to end: a worker writes its finished groups
NODE_FOLDER: Final = "/tmp"  # of the nodes
STATUS: Final = "JobID:|,State:|,Reason:|,exit_code:|,NodeList:|"
BEGINS: Final = "Slurm step begins on "
WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
ENDED: Final = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
#: Phrases in Slurm's errors if it does not answer.
UNREACHABLE: Final = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "onnection refused",
)
#: Phrases in Slurm's errors if it refuses a job, and the remedies.
REMEDIES: Final = (
    ("invalid partition", "launcher.slurm.partition: `sinfo --summarize` lists the partitions."),
    ("feature specification", "launcher.slurm.constraint: `sinfo --format='%N %f'` lists the features of the nodes."),
    ("account", "launcher.slurm.account: `sacctmgr show associations user=$USER` lists the accounts and their QOS."),
    ("qos", "launcher.slurm.qos: `sacctmgr show associations user=$USER` lists the accounts and their QOS."),
    ("time limit", "launcher.slurm.time: `sinfo --format='%P %l'` lists the time limits of the partitions."),
    (
        "",
        "launcher.resources, launcher.slurm: `sinfo --Node --format='%N %P %c %m %G'` lists the CPUs, memory (MB) and "
        "GPUs of the nodes; a partition may allow less.",
    ),
)
#: Slurm sets these in an allocation, and its commands refuse them next to `--mem`.
EXCLUSIVE: Final = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE")


def slurm(settings: Settings) -> Cluster:
    """A cluster that runs tasks as steps of this process's allocation, or as jobs if it is in none."""
    return Steps(settings.slurm) if "SLURM_JOB_ID" in os.environ else Jobs(settings.slurm)


@dataclass(frozen=True)
class Status:
    """The state of a job as Slurm reports it."""

    state: str = "PENDING"
    reason: str = ""
    code: int = 0
    node: str = ""


class Job:
    """A task as a job of `sbatch`. If Slurm requeues it, it waits, and then begins again."""

    def __init__(self, number: str, task: Task, jobs: Jobs) -> None:
        self.number = number
        self.task = task
        self.status = Status()
        self._jobs = jobs

    def waiting(self) -> str:
        waits = self.status.state in WAITING
        return self.status.reason.replace("None", "") or self.status.state if waits else ""

    def exit_code(self) -> int | None:
        """PREEMPTED if Slurm took the node back; 69 (EX_UNAVAILABLE) if Slurm ended it without a code."""
        if self.status.state not in ENDED:
            return None
        if self.status.state == "PREEMPTED":
            return PREEMPTED
        return self.status.code or (0 if self.status.state == "COMPLETED" else os.EX_UNAVAILABLE)

    def cancel(self) -> None:
        self._jobs.cancel([self])

    def update(self, status: Status) -> None:
        """Note the state of the job. If it has ended elsewhere, note in its output file where the output is."""
        if status.state in ENDED and not self.task.output.exists():
            files = f"{_node_output(self.task)} or {self.task.output}"
            where = f" on {status.node}; its output is there, in {files}" if status.node else ""
            self.task.output.write_text(f"Slurm job {self.number}: {status.state} {status.reason}{where}\n")
        self.status = status


class Jobs:
    """A cluster whose tasks are jobs."""

    def __init__(self, settings: Slurm) -> None:
        _require("sbatch", "squeue", "scancel")
        self._settings = settings
        self._jobs: list[Job] = []
        self._possible: set[Resources] = set()  # that Slurm has accepted
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_jobs, name="slurm", daemon=True)
        self._watch.start()

    def submit(self, task: Task) -> Submitted:
        """Submit a job. Slurm first tests whether it could ever run such a job."""
        if task.resources not in self._possible:  # not every cluster refuses at once what can never run
            self._sbatch(task, "--test-only")
            self._possible.add(task.resources)
        job = Job(self._sbatch(task, "--parsable").partition(";")[0].strip(), task, self)
        self._jobs.append(job)
        return job

    def machines(self) -> list[Machine]:
        return partition_nodes(_run_or_refuse, self._settings.partition)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End these jobs. Jobs that Slurm does not end are logged: they end with their lease."""
        alive = [job for job in jobs if job.exit_code() is None]
        if not alive:
            return
        try:
            _run(["scancel", "--quiet", *(job.number for job in alive)])
        except (ClusterUnreachable, subprocess.CalledProcessError) as error:
            log.warning("jobs %s could not be cancelled: %s", " ".join(job.number for job in alive), _error_text(error))
        for job in alive:
            job.update(Status("CANCELLED", code=128 + signal.SIGTERM))

    def close(self) -> None:
        self._closed.set()
        self.cancel(self._jobs)

    def _sbatch(self, task: Task, what: str) -> str:
        stated = {name: getattr(self._settings, name) for name in ("partition", "account", "qos", "time", "constraint")}
        # without a stated memory the cluster's default holds: `--mem=0` is the whole node's
        stated["mem"] = f"{task.resources.memory_mb}M" if task.resources.memory_mb else ""
        options = [
            "--no-requeue",  # a job that has lost its node: the flow submits another
            *("--output=/dev/null", f"--signal=B:TERM@{FLUSH_SECONDS}"),
            *(f"--{name}={value}" for name, value in stated.items() if value),
            *_options(task, self._settings),  # the user's, which are last, win
        ]
        # to the flow's file if the node can write there, else to a file of the node
        here, there, folder = (shlex.quote(str(p)) for p in (task.output, _node_output(task), task.output.parent))
        redirection = f"if [ -w {folder} ]; then exec >>{here} 2>&1; else exec >>{there} 2>&1; fi"
        script = f"#!/bin/sh\n{redirection}\n{_script(task, self._settings)}"
        try:
            return _run(["sbatch", what, *options], os.environ | dict(task.environment), script)
        except subprocess.CalledProcessError as error:
            raise _refused(task, error.stderr) from None

    def _watch_jobs(self) -> None:
        """Query all jobs at once, until closed. Slurm forgets a job some minutes after its end."""
        while not self._closed.wait(POLL_SECONDS):
            jobs = [job for job in self._jobs if job.exit_code() is None]
            try:
                found = _statuses([job.number for job in jobs]) if jobs else {}
                for job in jobs:
                    if job.exit_code() is None:  # it has not been cancelled meanwhile
                        job.update(found.get(job.number, Status("FAILED", "ForgottenBySlurm")))
            except Exception as error:  # the next query may succeed; without queries no job would ever be seen to end
                log.warning("the states of Slurm's jobs are not known: %s", _error_text(error))


class Step:
    """A task as a step of `srun` in this process's allocation."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output

    def waiting(self) -> str:
        """`Resources` until the step has printed that it begins: `srun` does not report that a step waits."""
        waits = self.exit_code() is None and BEGINS not in self.output.read_text(errors="replace")
        return "Resources" if waits else ""

    def exit_code(self) -> int | None:
        code = self.process.poll()
        return None if code is None else _code(code)

    def cancel(self) -> None:
        """`srun` passes SIGTERM on. After two SIGINT it has Slurm kill the step."""
        for number, seconds in (
            (signal.SIGTERM, 10.0),
            (signal.SIGINT, 0.2),
            (signal.SIGINT, 10.0),
            (signal.SIGKILL, 60.0),
        ):
            if self.exit_code() is None:
                self.process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)


class Steps:
    """A cluster whose tasks are steps of the allocation that this process runs in."""

    def __init__(self, settings: Slurm) -> None:
        _require("srun")
        self._settings = settings
        self._steps: list[Step] = []

    def submit(self, task: Task) -> Submitted:
        """Start a step. UserError if no node of the allocation has as many CPUs."""
        stated = re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # `8(x2),4`
        most = max(map(int, stated), default=task.resources.cpus)
        if task.resources.cpus > most:
            raise _refused(task, f"no node of this allocation has more than {most} CPUs", "Lower launcher.resources.")
        environment = {name: value for name, value in os.environ.items() if name not in EXCLUSIVE}
        own = ["--exact", "--input=none", "--kill-on-bad-exit=0"]
        shared = f"--mem={task.resources.memory_mb}M"  # of a step, 0 is the job's memory, which steps share
        options = [*own, shared, *_options(task, self._settings)]
        task.output.parent.mkdir(parents=True, exist_ok=True)
        with task.output.open("ab") as output:
            process = subprocess.Popen(
                ["srun", *options, "/bin/sh", "-c", f'echo "{BEGINS}$(hostname)"\n{_script(task, self._settings)}'],
                env=environment | dict(task.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        step = Step(process, task.output)
        self._steps.append(step)
        return step

    def machines(self) -> list[Machine]:
        return allocated_nodes(_run_or_refuse, os.environ["SLURM_JOB_ID"])

    def close(self) -> None:
        """Terminate all steps at once, then wait for each."""
        for step in self._steps:
            step.process.terminate()  # does nothing to one that has ended
        for step in self._steps:
            step.cancel()


def _options(task: Task, settings: Slurm) -> list[str]:
    """Options that `sbatch` and `srun` have in common."""
    needs = task.resources
    return [
        f"--job-name={task.name}",
        *("--nodes=1", "--ntasks=1", f"--cpus-per-task={needs.cpus}"),
        f"--gres={f'gpu:{needs.gpus}' if needs.gpus else 'none'}",
        f"--export={','.join(task.environment) or 'NIL'}",
        f"--chdir={NODE_FOLDER}",
        *([f"--container={settings.container}"] if settings.container else []),
        *settings.options,
    ]


def _script(task: Task, settings: Slurm) -> str:
    """The script that runs on the node."""
    return f"{settings.setup}\nexec {shlex.join(task.command)}\n"


def _node_output(task: Task) -> Path:
    return Path(NODE_FOLDER) / f"{task.name}.out"


def _statuses(numbers: Iterable[str]) -> dict[str, Status]:
    """The states of jobs, without those that Slurm has forgotten."""
    try:
        listed = _run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(numbers)}", f"--Format={STATUS}"])
    except subprocess.CalledProcessError as error:
        if "Invalid job id" in error.stderr:  # of the only one
            return {}
        raise
    rows = [line.split("|") for line in listed.splitlines()]
    return {
        number: Status(state, reason, _code(os.waitstatus_to_exitcode(int(status))), node)
        for number, state, reason, status, node, *_ in rows
    }


def _code(status: int) -> int:
    """The exit code of a process as a shell reports it: 128 + the number of the signal that ended it."""
    return status if status >= 0 else 128 - status


def _refused(task: Task, said: str, remedy: str = "") -> UserError:
    needs = task.resources
    what = f"{needs.cpus} CPUs, {needs.gpus} GPUs, {needs.memory_mb or 'any'} MB of memory"
    helps = remedy or next(helps for phrase, helps in REMEDIES if phrase in said.lower())
    return UserError(f"Slurm refuses {task.name} ({what}): {said.strip()}\n{helps}")


def _require(*commands: str) -> None:
    for command in commands:
        if shutil.which(command) is None:
            raise UserError(
                f"launcher.type: slurm needs the command {command}, which this machine does not have: run the flow on "
                "a login node of the cluster or inside an allocation, or install Slurm's client (Debian: slurm-client)"
            )


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None, given: str = "") -> str:
    """The output of a command of Slurm. ClusterUnreachable if Slurm is silent, CalledProcessError if it refuses."""
    try:
        done = subprocess.run(
            command, env=environment, input=given, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnreachable(f"{command[0]} has not answered for {COMMAND_SECONDS:g} s; is slurmctld up?") from None
    except subprocess.CalledProcessError as error:
        if any(phrase in error.stderr for phrase in UNREACHABLE):
            raise ClusterUnreachable(f"{error.stderr.strip()}: is slurmctld up? `scontrol ping` says so.") from None
        raise
    return done.stdout


def _error_text(error: Exception) -> str:
    """The text of an error: for a command, what it wrote to standard error."""
    return str(getattr(error, "stderr", "") or f"{type(error).__name__}: {error}").strip()


def _run_or_refuse(command: Sequence[str]) -> str:
    """As `_run`, but a refusal is a UserError."""
    try:
        return _run(command)
    except subprocess.CalledProcessError as error:
        raise UserError(f"{' '.join(command)}: {error.stderr.strip()}") from None
