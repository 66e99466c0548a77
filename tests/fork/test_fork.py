"""Forks: what comes before is shared, what follows is the child's own, and a kill at any instant changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage_driver import digests, drive, store_in, tiny

from areal_tasks.store.fork import Origin

AT = 1
ORIGIN = Origin("whole", AT)
#: Everything that an optimizer or a loss reads is another from here on.
OTHER = {
    "algorithm": {"minibatches": 4, "kl": "loss", "kl_coef": 0.5, "clip_ratio": 0.1},
    "trainer": {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.9, "max_grad_norm": 0.01},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`."""
    folder = tmp_path_factory.mktemp("whole")
    drive(folder, "whole", tiny())
    return folder


def test_an_unchanged_fork_repeats_its_parent_to_the_bit(whole: Path) -> None:
    before = set(store_in(whole).list("whole"))
    child = drive(whole, "same", tiny(), origin=ORIGIN)
    assert digests(whole, "same") == digests(whole, "whole")
    assert [child.commit(k).run for k in range(3)] == ["whole", "same", "same"]
    left = set(store_in(whole).list("whole")) - before
    assert {path.split("/")[1] for path in left} == {"references", "log"}
    assert not [path for path in store_in(whole).list("same") if "iteration=000000" in path or "stage=prompts" in path]


def test_a_changed_fork_goes_its_own_way_from_where_its_parent_stood(whole: Path, tmp_path: Path) -> None:
    """Its trainer is restored by the parent's recipe: a checkpoint there or none makes no difference."""
    found = []
    for seconds in (3600.0, 1e-6):
        folder = tmp_path / str(seconds)
        drive(folder, "whole", tiny(trainer={"recover_within_seconds": seconds}))
        drive(folder, "other", tiny(**OTHER), origin=ORIGIN)
        found.append(digests(folder, "other"))
    assert found[0] == found[1]
    assert found[0][:AT] == digests(whole, "whole")[:AT]
    changed, original = dict(found[0][AT]), dict(digests(whole, "whole")[AT])
    assert changed["rollout"] == original["rollout"] and changed["weights"] != original["weights"]
