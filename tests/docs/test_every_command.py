"""Each line of a shell block is executed by a test, or is named here with the reason why it is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from test_documentation import FENCE, NEXT, PAGES, PLACEHOLDER, ROOT, lines
from test_pages_deployed import ENDS, OURS, STARTS, deploys, serves
from test_pages_run import as_written, begins, executable, prepared, reads, typed

MACHINES: Final = "for several machines: tests/machines/test_deployment.py executes its like there"
GPU: Final = "it needs a GPU"
#: How the lines begin that no test executes as they are written, and why.
NOT_EXECUTED: Final = {
    ". .venv/bin/activate": "the tests run in this environment",
    "arealflow run my-project/recipe.yaml": "tests/flows/test_user_projects.py executes it",
    "arealflow run recipe.yaml launcher.type=ray": "it needs GPUs of several machines",
    "arealflow verify-cases": "tests/flows/test_verify_cases.py executes it",
    "cd /opt/src/arealflow": "a folder of the reader's machines",
    "deployments/ray/worker.sh": "for several machines: tests/machines/clusters.py",
    "docker compose": "it needs Docker; what the files name is checked in tests/docs/test_machines_page.py",
    "export": "it sets what the reader knows; tests set such variables themselves",
    "kill -9 $(pgrep -f prefect.engine)": "it kills all flow runs of a machine: tests/flows/test_recovery_flow_runs.py",
    "make demo": "tests/docs/test_pages_deployed.py executes its script, made short",
    "make test": "it is this test run",
    "nft add rule": "tests/machines/test_firewall.py executes it on machines of its own",
    "pip install -e '.[gpu,datasets]'": "it downloads packages for GPUs",
    "prefect --no-prompt deploy --all": "`arealflow up` executes it: tests/flows/test_deployments.py",
    "prefect automation create": MACHINES,
    "prefect deployment run evaluate/gsm8k-cpu": "it needs a pretrained model and GSM8K",
    "prefect deployment run rlhf/gsm8k": GPU,
    "prefect deployment run rlhf/gsm8k-async": GPU,
    "prefect deployment run rlhf/gsm8k-cpu": "it needs a pretrained model and GSM8K",
    "prefect deployment run rlhf/gsm8k-ray": GPU,
    "prefect deployment run sft/gsm8k": GPU,
    "prefect deployment run sft/gsm8k-cpu": "it needs a pretrained model and GSM8K",
    "prefect server start": MACHINES,
    "prefect work-pool create": MACHINES,
    "python -P -m flows.worker": MACHINES,
    "python -m areal_tasks.engines.sglang.child": GPU,
    "python -m sglang.launch_server": GPU,
    "python3 -m venv .venv": "it makes the environment that the tests run in",
    "ray drain-node": "for several machines: tests/machines/clusters.py asks Ray for the same",
}
#: How the lines begin that tests give to a shell.
IN_SHELL: Final = ("openssl ", "python -c ", "run=")
PROGRAMS: Final = re.compile(
    r"^(\$ )?(arealflow|cd|docker|export|kill|make|nft|openssl|pip|prefect|python3?|ray|\.) ", re.MULTILINE
)


def executed(line: Sequence[str]) -> bool:
    words = [word.replace(NEXT, "\n") for word in line if not PLACEHOLDER.search(word)]
    return " ".join(line).startswith(IN_SHELL) or any(
        wanted(words) for wanted in (reads, prepared, begins, serves, deploys)
    )


def begins_so(line: Sequence[str], start: str) -> bool:
    words = start.replace("'", "").split(" ")
    return list(line[: len(words)]) == words


def test_every_line_of_a_shell_block_is_executed_or_says_why_not() -> None:
    left_out = [line for page in PAGES for line in lines(page) if not executed(line)]
    unexplained = [line for line in left_out if not any(begins_so(line, start) for start in NOT_EXECUTED)]
    assert not unexplained, "execute these, or say in NOT_EXECUTED why not"
    unneeded = [start for start in NOT_EXECUTED if not any(begins_so(line, start) for line in left_out)]
    assert not unneeded, "no page has these, or they are executed"


def test_where_else_commands_are_executed_there_are_tests() -> None:
    named = [file for reason in NOT_EXECUTED.values() for file in re.findall(r"tests/[\w/]+\.py", reason)]
    assert named and all((ROOT / file).exists() for file in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_in_shell_blocks(page: Path) -> None:
    others = [text for language, text in FENCE.findall(page.read_text()) if language not in ("bash", "console")]
    assert not [text for text in others if PROGRAMS.search(text)], "a block of commands begins with ```bash"


def test_there_is_something_to_execute() -> None:
    assert sum(len(list(executable(page))) for page in PAGES) > 100
    assert all(as_written(start) for start in IN_SHELL)
    every = [words for page in PAGES for words in typed(page)]
    assert {words[3] for words in every if deploys(words)} == set(OURS)
    assert {words[1] for words in every if serves(words)} == {*STARTS, *ENDS}
