"""YAML as recipes mean it: `1e-6` is a number, a key given twice is an error, and errors name line and column."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

from schemas.errors import UserError

_FLOAT: Final = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)$|^[-+]?(\d+\.\d*|\.\d+)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats, refusing duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
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
    """The value of a YAML text. UserError names `origin`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{origin}{where}: no valid YAML: {getattr(error, 'problem', None) or error}") from None
