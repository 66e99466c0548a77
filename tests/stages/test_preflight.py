"""What is known to fail is refused before a run exists."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from stage_driver import tiny

from areal_tasks.stages import preflight
from areal_tasks.stages.preflight import check_engines, check_inputs
from areal_tasks.store.backend import open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.opening import open_run
from schemas.errors import UserError
from schemas.recipe.load import load_recipe, warm_start
from schemas.recipe.recipe import Recipe


@pytest.mark.parametrize("name", ["gsm8k", "evaluate-gsm8k"])
def test_an_engine_that_is_not_installed_is_named_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # not even where it is installed
    with pytest.raises(UserError, match=r"inference\.engine: sglang is not installed here; run: pip install 'arealfl"):
        check_engines(load_recipe(name))


def test_servers_that_run_elsewhere_need_no_engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "https://10.0.0.5:30000")
    check_engines(load_recipe("evaluate-gsm8k"))


@pytest.mark.parametrize(
    "address", ["10.0.0.5:30000", "http://gpu9:30000", "HTTP://gpu9:30000", "127.0.0.1:1,http://[fd00::5]:30000"]
)
def test_nothing_is_sent_unencrypted_to_other_machines_unless_the_recipe_trusts_the_network(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", address)
    refused = r"(?i:http)://(10|gpu9|\[fd00).*would be sent prompts.*unencrypted.*inference\.trust_network=true"
    with pytest.raises(UserError, match=refused):
        check_engines(load_recipe("evaluate-gsm8k"))
    check_engines(load_recipe("evaluate-gsm8k", ["inference.trust_network=true"]))
    check_engines(load_recipe("sft-gsm8k"))


@pytest.mark.parametrize("address", ["localhost:30000", "127.0.0.2:30000", "http://[::1]:30000", "https://gpu9"])
def test_what_stays_here_or_is_encrypted_needs_no_trust(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", address)
    check_engines(load_recipe("evaluate-gsm8k"))


def test_deepspeed_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    recipe = load_recipe("sft-gsm8k", ["trainer.backend=deepspeed"])
    with pytest.raises(UserError, match=r"trainer\.backend: deepspeed is not installed here"):
        check_engines(recipe)
    check_engines(load_recipe("sft-gsm8k", ["trainer.backend=deepspeed", "trainer.zero_stage=0"]))


def test_fsdp2_needs_nothing_more() -> None:
    check_engines(load_recipe("sft-gsm8k"))


def test_gpus_of_the_flow_s_machine_are_counted_only_if_services_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "require_package", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"= 2 GPUs, and 1 is visible"):
        check_engines(load_recipe("gsm8k", ["inference.servers=2"]))
    elsewhere = ["launcher.type=slurm", "launcher.network=10.0.0.0/24", "trainer.ranks=8"]
    check_engines(load_recipe("gsm8k", ["inference.servers=2", *elsewhere]))


def test_the_engines_of_the_quickstart_are_there() -> None:
    check_engines(load_recipe("quickstart"))
    check_engines(load_recipe("quickstart-sft"))


# ── what a run would begin with ─────────────────────────────────────────────────────────────────────────────────────


def refused(recipe: Recipe, name: str = "") -> str:
    with pytest.raises(UserError) as error:
        check_inputs(recipe, name)
    return str(error.value)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def quickstart(store: str, *overrides: str) -> Recipe:
    return load_recipe("quickstart", [f"store.url={store}", *overrides])


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "a file stands where a folder should be" in refused(quickstart((tmp_path / "file").as_uri()))


def test_a_store_that_may_not_be_written(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))  # no folder refuses root
    assert f"{tmp_path}/store cannot be used: permission denied" in refused(quickstart(store))
    assert asked == [tmp_path / "store"]


def test_a_store_whose_folder_cannot_be_made() -> None:
    """Root may write to /proc, as far as its permissions say, and can make no folder there."""
    said = refused(quickstart("file:///proc/nope/store"))
    assert "/proc/nope/store cannot be used" in said and "choose another store" in said


@pytest.mark.parametrize("launcher", ["ray", "slurm", "my_cluster:Machines"])
def test_a_store_on_this_machine_for_services_on_others(launcher: str, store: str, tmp_path: Path) -> None:
    recipe = quickstart(store, f"launcher.type={launcher}", "launcher.network=10.0.0.0/24")
    said = f"store.url: {store} is a folder of this machine, and launcher.type {launcher} runs services on others"
    assert recipe.model.warm_start and said in refused(recipe, "mine")
    assert not any(tmp_path.iterdir())


def test_a_run_of_that_name_with_another_recipe(store: str) -> None:
    open_run(open_store(store), "taken", tiny(rollout={"groups": 8}))
    recipe = tiny(store={"url": store})
    assert "rollout.groups is 8 in the run and 4 here" in refused(recipe, "taken")
    check_inputs(recipe, "free")


def test_data_that_is_not_there(store: str, tmp_path: Path) -> None:
    source = f"data.source={tmp_path}/{{split}}.jsonl"
    (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "1"}')
    assert f"'{tmp_path}/test.jsonl': there is no such file" in refused(quickstart(store, source))
    (tmp_path / "test.jsonl").write_text('{"question": "1", "answre": "1"}')
    assert "test.jsonl', line 1 has no column 'answer'" in refused(quickstart(store, source))
    check_inputs(quickstart(store, source, "evaluation={}"))


def test_a_model_that_is_not_there(store: str, tmp_path: Path) -> None:
    model = ["model.warm_start=", "model.path="]
    recipe = quickstart(store, model[0], f"{model[1]}{tmp_path}/model")
    assert f"there is no folder '{tmp_path}/model'" in refused(recipe)
    (tmp_path / "model").mkdir()
    assert "has no config.json" in refused(recipe)
    assert "there is no run 'mine'" in refused(quickstart(store, model[0], f"{model[1]}run://mine"))


def test_what_lies_in_a_folder_that_is_here_is_no_name_on_the_hub(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("models/none", "./none", "../none"):
        assert f"there is no folder '{path}'" in refused(quickstart(store, "model.warm_start=", f"model.path={path}"))


def test_data_of_the_hub_needs_a_package(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    said = refused(quickstart(store, "data.source=openai/gsm8k"))
    assert said.startswith("data.source=openai/gsm8k: datasets is not installed here; run: pip install")


def test_the_hub_is_not_asked(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "require_package", lambda package, field: None)
    check_inputs(quickstart(store, "model.warm_start=", "model.path=org/model"))
    check_inputs(quickstart(store, "data.source=org/data"))
    check_inputs(quickstart(store, "data.source=s3://bucket/{split}.jsonl"))


def test_the_first_run_of_a_warm_start_is_looked_at_too(store: str) -> None:
    taken = load_recipe("quickstart-sft", ["trainer.lr=0.5", f"store.url={store}"])
    open_run(open_store(store), "mine-sft", taken)
    assert "'mine-sft' exists with another recipe: trainer.lr" in refused(quickstart(store), "mine")


def test_a_fork_is_continued_with_the_model_of_its_parent(store: str) -> None:
    own = load_recipe("quickstart", [f"store.url={store}"])
    model = warm_start(own, "parent")[1].model
    for name, origin in (("parent", None), ("child", Origin("parent", 0))):
        open_run(open_store(store), name, own.model_copy(update={"model": model}), origin=origin)
    checked = check_inputs(own, "child")
    assert (checked.stored.origin, checked.recipe.model) == (Origin("parent", 0), model)
    other = quickstart(store, "model.warm_start=", "model.path=org/other")
    assert "begins with the initial weights of its parent" in refused(other, "child")


def test_what_a_run_has_in_its_store_is_not_looked_for_elsewhere(store: str, tmp_path: Path) -> None:
    recipe = tiny(store={"url": store}, data={"source": f"{tmp_path}/gone/{{split}}.jsonl"})
    open_run(open_store(store), "there", recipe)
    check_inputs(recipe, "there")
    assert "there is no such file" in refused(recipe, "new")


def test_a_verifier_that_is_not_there_is_not_imported_to_know_it(store: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (tmp_path / "mine_to_import.py").write_text("raise SystemExit")
        check_inputs(quickstart(store, "reward.verifier=mine_to_import:judge"))
    assert "no module 'nosuch_package'" in refused(quickstart(store, "reward.verifier=nosuch_package.part:judge"))
    assert "'mth' is none of math, exact" in refused(quickstart(store, "reward.verifier=mth"))


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"trainer\.ranks: 2 ranks need a GPU each, and 1 is visible"):
        check_engines(load_recipe("sft-gsm8k", ["trainer.ranks=2"]))
