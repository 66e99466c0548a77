"""The machines of a trainer fetch each file of a table once among them, pass it on, and verify it.

Ranks are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore
from trainer_builders import advantage, rollout
from two_ranks import FarAway

from areal_tasks.engines.trainer import tables
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.tables import FetchedTables
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.shards import read_files, read_table, write_table
from schemas.errors import UserError
from schemas.manifest import TableRef
from schemas.tables import ADVANTAGE, ROLLOUT

RANKS_HERE = 2
COLUMNS = {"rollout": ROLLOUT.names, "advantage": ADVANTAGE.names}
Altered = Callable[[int, int, torch.Tensor], None]


class Links:
    """What passes between the machines: `altered(sender, receiver, piece)` may change it."""

    def __init__(self, machines: int, altered: Altered) -> None:
        self.altered = altered
        self.sent: list[torch.Tensor] = [torch.zeros(0)] * machines
        self.met = threading.Barrier(machines)

    def all_gather(self, pieces: Sequence[torch.Tensor], piece: torch.Tensor, group: int) -> None:
        self.sent[group] = piece
        self.met.wait()
        for sender, target in enumerate(pieces):
            target.copy_(self.sent[sender])
            self.altered(sender, group, target)
        self.met.wait()


class Machines:
    """A store far from so many machines with two ranks each, and what each machine has fetched of it."""

    def __init__(self, folder: Path, machines: int) -> None:
        self.store = open_store((folder / "store").as_uri())
        self.far = [FarAway(self.store) for _ in range(machines)]
        shared = HashStore()
        self.ranks = []
        for rank in range(machines * RANKS_HERE):
            group = Group(rank, machines * RANKS_HERE, shared, local_world=RANKS_HERE)
            self.ranks.append(FetchedTables(group, folder / f"machine-{group.machine}"))
            self.ranks[-1]._leaders = group.machine  # what `Links` knows a machine by

    def files(self, refs: dict[str, TableRef], keeps: bool = False) -> list[Any]:
        """What each rank gets, or the error it raises."""

        def of(rank: FetchedTables) -> Any:
            try:
                return rank.files(cast(Store, self.far[rank.group.machine]), refs, keeps)
            except UserError as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(of, self.ranks))

    def fetched(self) -> list[str]:
        """The files that were fetched since the last call, by any machine."""
        found = sorted(name for far in self.far for name in far.fetched)
        for far in self.far:
            far.fetched.clear()
        return found


@pytest.fixture(params=[2, 3])
def machines(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(tables, "PIECE_BYTES", 1000)
    _link(monkeypatch, request.param, lambda sender, receiver, piece: None)
    return Machines(tmp_path, request.param)


def _link(monkeypatch: pytest.MonkeyPatch, machines: int, altered: Altered) -> None:
    monkeypatch.setattr(tables.dist, "all_gather", Links(machines, altered).all_gather)


def _written(store: Store) -> dict[str, TableRef]:
    """Five files of unequal size of a rollout, and two of its advantages."""
    table = rollout([9, 4, 13, 6, 11, 3, 8, 5, 10])
    made = {"rollout": (table, 2), "advantage": (advantage(table), 5)}
    return {name: write_table(store, "made", name, of, max_rows=rows) for name, (of, rows) in made.items()}


def _names(*refs: TableRef) -> list[str]:
    return sorted(Path(shard.path).name for ref in refs for shard in ref.shards)


def _check(machines: Machines, refs: dict[str, TableRef], found: list[Any]) -> None:
    """Every rank reads the same rows from its machine's disk as from the store."""
    for files in found:
        for name, ref in refs.items():
            whole = read_table(machines.store, ref)
            assert read_files(name, files[name], COLUMNS[name]).equals(whole)


def test_the_store_gives_each_file_once(machines: Machines) -> None:
    refs = _written(machines.store)
    _check(machines, refs, machines.files(refs))
    assert machines.fetched() == _names(*refs.values())


def test_what_all_keep_is_not_fetched_again_and_nothing_else_is_kept(machines: Machines) -> None:
    refs = _written(machines.store)
    machines.files({"rollout": refs["rollout"]}, keeps=True)
    machines.fetched()
    _check(machines, refs, machines.files(refs))
    assert machines.fetched() == _names(refs["advantage"])
    machines.files({"advantage": refs["advantage"]})
    kept = [{file.stem for file in rank.folder.iterdir()} for rank in machines.ranks]
    assert kept == [{shard.sha256 for shard in refs["advantage"].shards}] * len(kept)


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip_a_bit(file: Path) -> None:
    good = file.read_bytes()
    file.write_bytes(good[:50] + bytes([good[50] ^ 1]) + good[51:])


@pytest.mark.parametrize(("harm", "fetches"), [(Path.unlink, 0), (_cut_short, 0), (_flip_a_bit, 1)])
def test_what_the_last_machine_has_lost_comes_from_the_others_and_what_is_damaged_from_the_store(
    machines: Machines, harm: Callable[[Path], None], fetches: int
) -> None:
    refs = _written(machines.store)
    files = machines.files(refs, keeps=True)
    machines.fetched()
    harm(files[-1]["rollout"][3])
    _check(machines, refs, machines.files(refs))
    assert len(machines.fetched()) == fetches


def test_what_is_altered_on_the_way_is_found_and_fetched(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single bit, on the way from the first machine to the last."""
    count, altered = len(machines.far), []

    def alter(sender: int, receiver: int, piece: torch.Tensor) -> None:
        if (sender, receiver) == (0, count - 1) and not altered:
            altered.append(piece)
            piece[7] ^= 1

    _link(monkeypatch, count, alter)
    refs = _written(machines.store)
    _check(machines, refs, machines.files(refs))
    fetched = machines.fetched()
    assert altered and len(fetched) == len(_names(*refs.values())) + 1
    assert set(fetched) == set(_names(*refs.values()))


def test_a_damaged_file_of_the_store_is_named_on_every_rank(machines: Machines) -> None:
    refs = _written(machines.store)
    path = machines.store.local(refs["rollout"].shards[1].path)
    assert path is not None
    _flip_a_bit(path)
    found = machines.files(refs)
    assert {type(error) for error in found} == {UserError} and all(path.name in str(error) for error in found)
    _flip_a_bit(path)
    _check(machines, refs, machines.files(refs))


def test_a_machine_that_fetches_nothing_itself_gets_what_the_others_fetch(machines: Machines) -> None:
    """A small table is one file: only one machine has anything to fetch into its folder."""
    table = rollout([9, 4])
    refs = {"rollout": write_table(machines.store, "made", "rollout", table)}
    _check(machines, refs, machines.files(refs))
    assert machines.fetched() == _names(*refs.values())


def test_what_one_machine_has_in_part_is_passed_on_anew(machines: Machines) -> None:
    """Its disk was full while the last files arrived."""
    refs = _written(machines.store)
    last = machines.ranks[-1]
    last.folder.mkdir()
    for shard in refs["rollout"].shards:
        last._at(shard).write_bytes(b"part")
    _check(machines, refs, machines.files(refs))
    assert machines.fetched() == _names(*refs.values())
