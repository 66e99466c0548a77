"""How a recipe's fields are declared: each is semantic (it enters the keys of the stages that read it) or operational."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A part of a recipe. Unknown keys are refused; values are checked also when assigned."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


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
