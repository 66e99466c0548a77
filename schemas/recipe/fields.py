"""How a recipe's fields are declared: semantic ones enter the keys of the stages that read them, operational never."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

#: `before` of a field that every recorded recipe has.
ALWAYS_THERE: Final = ...


class Section(BaseModel):
    """A part of a recipe. Unknown keys are refused; a recipe does not change once it is checked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def semantic(
    default: Any = ...,
    *,
    description: str,
    before: Any = ALWAYS_THERE,
    formerly: Sequence[Any] = (),
    **bounds: Any,
) -> Any:
    """A field that changes what is computed: it enters the keys of the stages that read it.

    A run keeps the values that it was begun with, whatever the defaults are when it is resumed
    (`schemas.recipe.recorded`). So that it can, a field says what it has been:

    Args:
        before: For a field that was added later: the value that stands for how runs were computed before the field
            existed. Recorded recipes that lack the field are read with it, and where a field has this value it is
            left out of keys, so that those of recorded stages stay as they are.
        formerly: For a field whose default has changed: its former defaults. Recorded recipes and keys contain the
            value already.
    """
    history = {} if before is ALWAYS_THERE else {"before": before}
    history |= {"formerly": list(formerly)} if formerly else {}
    return Field(default, description=description, json_schema_extra={"semantic": True, **history}, **bounds)


def operational(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """A field that changes how, where or how fast, never what: it enters no key."""
    return Field(default, description=description, json_schema_extra={"semantic": False}, **bounds)


def section(model: type[Section], description: str) -> Any:
    """A nested section whose fields all have defaults. Each of them says whether it is semantic."""
    return Field(default_factory=model, description=description, json_schema_extra={"semantic": True})


def is_semantic(info: FieldInfo) -> bool:
    return bool(_extra(info).get("semantic"))


def before(info: FieldInfo) -> Any:
    """What runs were computed with before the field existed; `ALWAYS_THERE` if it is not a later one."""
    return _extra(info).get("before", ALWAYS_THERE)


def former_values(info: FieldInfo) -> list[Any]:
    """The values that runs may have that did not set the field, besides today's default."""
    earlier = before(info)
    return [*([] if earlier is ALWAYS_THERE else [earlier]), *_extra(info).get("formerly", [])]


def is_default(info: FieldInfo, value: Any) -> bool:
    """Whether `value` is what the field has where nothing sets it."""
    return bool(value == info.get_default(call_default_factory=True))


def is_set(info: FieldInfo, value: Any) -> bool:
    """Whether `value` was chosen: a former default, which a resumed run may have, was not."""
    return not is_default(info, value) and value not in former_values(info)


def nested_section(info: FieldInfo) -> type[Section] | None:
    """The section a field holds, also where it may be absent; None for a field that is a plain value."""
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """The plain values of a recipe or section: dotted path, value and declaration of each."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, info


def _extra(info: FieldInfo) -> dict[str, Any]:
    extra = info.json_schema_extra
    return extra if isinstance(extra, dict) else {}
