"""How a recipe's fields are declared: semantic ones enter the keys of the stages that read them, operational never."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A part of a recipe. Unknown keys are refused; a recipe does not change once it is checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def semantic(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """A field that changes what is computed: it enters the keys of the stages that read it."""
    return Field(default, description=description, json_schema_extra={"semantic": True}, **bounds)


def operational(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """A field that changes how, where or how fast, never what: it enters no key."""
    return Field(default, description=description, json_schema_extra={"semantic": False}, **bounds)


def section(model: type[Section], description: str) -> Any:
    """A nested section whose fields all have defaults."""
    return Field(default_factory=model, description=description)


def is_semantic(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("semantic"))


def nested_section(info: FieldInfo) -> type[Section] | None:
    """The section a field holds, also where it may be absent; None for a field that is a plain value."""
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
