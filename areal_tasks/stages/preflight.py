"""Checks before a run exists and before any service starts. Imports no Prefect, and torch only for chat templates."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_tasks.data.datasets import Row, check_data
from areal_tasks.engines.external import check_encrypted, external_servers
from areal_tasks.engines.models import check_model, load_tokenizer
from areal_tasks.launchers.choice import check_shared, on_this_machine
from areal_tasks.launchers.gpus import place_recipe, visible_gpus
from areal_tasks.rewards.load import BUILT_IN, check_module
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.fork import Origin, inherit_model
from areal_tasks.store.objects.local import unusable
from areal_tasks.store.opening import StoredRun, read_stored_run
from areal_tasks.store.paths import run_record
from schemas.errors import UserError
from schemas.recipe.load import sft_run_name, warm_start
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe
from schemas.recipe.sources import source_kind


def check_engines(recipe: Recipe) -> None:
    """Raise UserError if the recipe asks for an engine that is not installed here, for GPUs that do not exist, or for
    servers that would be sent prompts unencrypted."""
    external = external_servers()
    if not isinstance(recipe, SftRecipe):
        check_encrypted(external, recipe.inference.trust_network)
        if recipe.inference.engine == "sglang" and not external:
            require_package("sglang", "inference.engine")
    trainer = None if isinstance(recipe, EvaluateRecipe) else recipe.trainer
    if trainer is not None and trainer.backend == "deepspeed" and trainer.zero_stage:
        require_package("deepspeed", "trainer.backend")
    place_recipe(recipe, visible_gpus() if on_this_machine(recipe.launcher) else (), bool(external))


def require_package(package: str, field: str) -> None:
    """Raise UserError with the install command if an optional `package` is not there; does not import it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name without a package has no origin
        raise UserError(f"{field}: {package} is not installed here; run: pip install 'arealflow[{package}]'")


def check_code(recipe: Recipe) -> None:
    """Load the recipe's workflow and filter, and its verifier in a process that can be killed.

    Raises UserError: one of them does not exist, cannot be imported or does not take its arguments.
    """
    if isinstance(recipe, SftRecipe):
        return
    # these import the client of inference servers, which no other check needs
    from areal_tasks.rollout.filters import load_function
    from areal_tasks.workflows import load_workflow

    if isinstance(recipe, RlhfRecipe):
        load_function(recipe.rollout.filters)
    load_workflow(recipe.workflow.name, recipe.workflow.arguments)
    if recipe.reward.verifier not in BUILT_IN or recipe.reward.arguments:  # otherwise nothing can be wrong
        with VerifierPool(recipe.reward.model_copy(update={"workers": 1})):
            pass


@dataclass(frozen=True)
class Checked:
    """A recipe that a start may use, and what the store holds of the run.

    `kept`: by dotted path, the recorded values that the run keeps although their defaults have changed.
    """

    recipe: Recipe
    kept: Mapping[str, Any]
    stored: StoredRun


def check_inputs(recipe: Recipe, name: str = "", origin: Origin | None = None) -> Checked:
    """Check that the store can be used, that the run `name` can be opened, and that its inputs exist.

    A fork gets the model of its parent. An existing or derived run has model and data in the store. Models and data on
    a network are not checked.

    Args:
        origin: that of a derived run; not needed to continue an existing fork.

    Raises UserError: the store cannot be used, here or by services on other machines; the run exists with another
    recipe; it cannot be derived from this parent; or model, data, or the module of the verifier do not exist.
    """
    store, first = open_store(recipe.store.url), None
    check_shared(store, recipe.launcher)
    check_usable(store)
    stored = read_stored_run(store, name, origin) if name else StoredRun(store, name)
    if stored.parent and stored.origin and stored.origin.kind == "fork":
        recipe = inherit_model(stored.parent, stored.origin.iteration, recipe)
    elif isinstance(recipe, RlhfRecipe) and recipe.model.warm_start:
        first, recipe = warm_start(recipe, name)
    recipe, kept = stored.recipe_to_continue(recipe)
    stored.check(recipe)
    if first is not None:
        check_inputs(first, sft_run_name(name) if name else "")
    if stored.record is None and stored.origin is None:
        _check_sources(recipe, store, first is None)
    if not isinstance(recipe, SftRecipe):
        check_module(recipe.reward.verifier)
    return Checked(recipe, kept, stored)


def _check_sources(recipe: Recipe, store: Store, own_model: bool) -> None:
    if source_kind(recipe.data.source) == "hub":
        require_package("datasets", f"data.source={recipe.data.source}")
    check_data(recipe)
    if own_model:
        check_model(store, recipe.model)
        check_chat(recipe)


def check_chat(recipe: Recipe) -> None:
    """UserError if the chat template of a model in a local folder refuses the messages that `data` makes."""
    folder = Path(recipe.model.path).expanduser()
    if recipe.data.chat and recipe.model.path and folder.is_dir():
        from areal_tasks.data.tokenising import render_messages  # imports torch

        render_messages([Row(0, "", "")], [recipe.data.template], recipe.data, load_tokenizer(folder))


def check_usable(store: Store) -> None:
    """Create the store's folder. UserError if it cannot be read, or its folder not created or written."""
    store.exists(run_record("any"))
    root = store.local("")
    if root is not None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise unusable(str(root), error) from error
