"""Loads a recipe by name or path, with overrides, and validates it; turns all errors into one readable message.

YAML is read so that `1e-6` is a number, a duplicate key is an error, and errors name line and column.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import UserError
from schemas.recipe.checks import PROBLEMS, REFUSED_KEYS
from schemas.recipe.fields import nested_section, same_field
from schemas.recipe.recipe import BaseRecipe, EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe
from schemas.recipe.sources import SPLIT, local_path, source_kind

RECIPES: Final[dict[str, type[RlhfRecipe] | type[SftRecipe] | type[EvaluateRecipe]]] = {
    "rlhf": RlhfRecipe,
    "sft": SftRecipe,
    "evaluate": EvaluateRecipe,
}
_FLOAT: Final = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)$|^[-+]?(\d+\.\d*|\.\d+)$")


def list_recipes() -> list[str]:
    """The names of the shipped recipes, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in files("deployments").iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or in that file, with overrides like `rollout.groups=8`. UserError lists all errors.

    A relative data path in a recipe file may refer to the current folder or the file's: see `with_absolute_data`.
    """
    values = parse_yaml(_read(str(name_or_path)), str(name_or_path))
    if not isinstance(values, dict):
        raise UserError(f"recipe '{name_or_path}' should be a mapping of sections, not {type(values).__name__}")
    recipe = parse_recipe(values, str(name_or_path), overrides)
    if str(name_or_path) in list_recipes():
        return recipe
    return with_absolute_data(recipe, Path(name_or_path).resolve().parent)


def with_absolute_data(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe, with its data path made absolute if it is relative and its files exist only in `folder`.

    A path in the current folder stays relative, as runs have recorded it. UserError if both have different files.
    """
    data = recipe.data
    if source_kind(data.source) != "file" or local_path(data.source) != data.source or Path(data.source).is_absolute():
        return recipe
    names = [data.source.replace(SPLIT, split) for split in (data.train_split, data.eval_split)]
    in_folder = [name for name in names if (folder / name).exists()]
    in_current = [name for name in names if Path(name).exists()]
    same = all((folder / name).samefile(name) for name in in_folder if name in in_current)
    if not in_folder or (in_current and same):
        return recipe
    if in_current:
        raise UserError(
            f"data.source '{data.source}' is in the current folder ({Path.cwd()}) and in that of the recipe ({folder}"
            "): give the absolute path of the one to use"
        )
    return recipe.model_copy(update={"data": data.model_copy(update={"source": str(folder / data.source)})})


def parse_recipe(values: Mapping[str, Any], origin: str = "", overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe of nested values, with overrides as in `apply_overrides`. UserError names every problem."""
    values = apply_overrides(values, overrides)
    flow = str(values.get("flow", ""))
    if flow not in RECIPES:
        found = f"is '{flow}'{suggestion(flow, RECIPES)}" if flow else "is missing"
        raise UserError(f"recipe '{origin}': flow {found}; it should be one of {', '.join(RECIPES)}")
    model = RECIPES[flow]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        changed = f" with {' '.join(overrides)}" if overrides else ""
        lines = [f"recipe '{origin or values.get('name', '')}'{changed} cannot be used:"]
        for problem in error.errors(include_url=False):
            messages = problem["ctx"]["problems"] if problem["type"] == PROBLEMS else [_line(problem, model)]
            lines += [f"  - {line}" for line in messages]
        raise UserError("\n".join(lines)) from None


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `values` with each `dotted.key=value` set, read as YAML, or "" if blank; also under a former name."""
    result, model = copy.deepcopy(dict(values)), RECIPES.get(str(values.get("flow")), BaseRecipe)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"override '{override}' should look like section.field=value, such as rollout.groups=8")
        value = parse_yaml(text, f"override '{override}'") if text.strip() else ""
        keys = key.strip().split(".")
        set_value(result, keys, value, override, same_field(_section_at(model, keys[:-1]), keys[-1]))
    return result


def sft_run_name(name: str) -> str:
    """The name of the SFT run whose last weights the run `name` begins with."""
    return f"{name}-sft"


def warm_start(recipe: RlhfRecipe, name: str) -> tuple[SftRecipe, RlhfRecipe]:
    """The recipe of the SFT run that comes first, in the same store, and `recipe` with its last weights."""
    first = load_recipe(recipe.model.warm_start)
    if not isinstance(first, SftRecipe):
        raise UserError(f"model.warm_start: {recipe.model.warm_start!r} is a recipe for {first.flow}; name one for sft")
    model = recipe.model.model_copy(update={"path": f"run://{sft_run_name(name)}", "warm_start": ""})
    shared = {"store": recipe.store, "launcher": recipe.launcher}
    return first.model_copy(update=shared), recipe.model_copy(update={"model": model})


def run_and_changes(words: Sequence[str] | None) -> tuple[str, list[str]]:
    """Split a command line's `key=value` words into the name in `run=NAME` ("" without one) and recipe overrides.

    The last value of a key counts. UserError if a word has no `=`.
    """
    for word in words or []:
        if "=" not in word:
            raise UserError(f"'{word}' is not of the form section.field=value (or run=NAME)")
    settings = dict(word.partition("=")[::2] for word in words or [])
    name = settings.pop("run", "")
    return name, [f"{key}={value}" for key, value in settings.items()]


def _read(name: str) -> str:
    known = list_recipes()
    if name in known:
        return files("deployments").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    path = Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise UserError(f"recipe file '{name}' does not exist; recipes by name: {', '.join(known)}")
    raise UserError(f"unknown recipe '{name}'{suggestion(name, known)}; name a YAML file or one of: {', '.join(known)}")


def set_value(
    values: dict[str, Any], keys: Sequence[str], value: Any, override: str, replaced: Iterable[str] = ()
) -> None:
    """Set a value of nested ones, in place, and remove those that it has `replaced`; errors name the `override`."""
    for depth, key in enumerate(keys[:-1], 1):
        if values.get(key) is None:
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise UserError(f"override '{override}': {'.'.join(keys[:depth])} is a value, not a section")
    for name in replaced:
        values.pop(name, None)
    values[keys[-1]] = value


def _line(problem: ErrorDetails, model: type[BaseModel]) -> str:
    """A problem in one line: the dotted field, what is wrong with it, and what would be right."""
    loc, kind = problem["loc"], problem["type"]
    dotted = ".".join(map(str, loc)) or "recipe"
    if dotted in REFUSED_KEYS:
        return f"{dotted}: {REFUSED_KEYS[dotted]}"
    if kind == "extra_forbidden":
        known = list(_section_at(model, loc[:-1]).model_fields)
        return f"{dotted}: unknown key{suggestion(str(loc[-1]), known)}; known here: {', '.join(known)}"
    if kind == "missing":
        return f"{dotted}: is required"
    text, value = problem["msg"].removeprefix("Value error, ").removeprefix("Input "), repr(problem["input"])
    short = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{dotted}: {text}" if kind == "value_error" else f"{dotted}: {text}, not {short}"


def _section_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    for key in loc:
        info = model.model_fields.get(str(key))
        model = (nested_section(info) if info else None) or model
    return model


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean '…'?)` with the nearest of the `known` words; empty if none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats, refusing duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As in SafeLoader. ConstructorError, with line and column, for a key that is no text or occurs twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = "a key should be text" if not isinstance(key, str) else f"the key '{key}' occurs twice"
            if not isinstance(key, str) or key in seen:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text. UserError with `origin`, line and column if it is invalid."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{origin}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
