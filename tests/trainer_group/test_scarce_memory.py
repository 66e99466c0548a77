"""Ranks that cannot all have a copy of what they are to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_ranks_agree_to_wait_where_one_of_them_is_refused_memory(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("scarce_rank.py"))
    commands = [[sys.executable, program, str(rank), str(tmp_path)] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert said[0] == ["scarce False 0 1 end", "roomy True 0 1 end"]
    assert [line.split()[:2] for line in said[1]] == [["scarce", "False"], ["roomy", "True"]]
