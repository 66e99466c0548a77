"""Declaration of recipe fields: semantic ones are part of the keys of the stages that read them, operational never."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

#: `before` of a field that every recorded recipe has.
ALWAYS_THERE: Final = ...


class Section(BaseModel):
    """A part of a recipe. Unknown keys are refused; a validated recipe is immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_former_names(cls, values: Any) -> Any:
        return with_current_names(values, cls) if isinstance(values, Mapping) else values


def semantic(
    default: Any = ...,
    *,
    description: str,
    before: Any = ALWAYS_THERE,
    formerly: Sequence[Any] = (),
    renamed_from: str = "",
    live: bool = False,
    **bounds: Any,
) -> Any:
    """A field that changes what is computed: it is part of the keys of the stages that read it.

    A resumed run keeps the values that it was started with, even if defaults have changed (`schemas.recipe.recorded`).
    For that, a field declares its history:

    Args:
        before: For a field that was added later: the value equivalent to how runs were computed before the field
            existed. Recorded recipes that lack the field are read with it, and a field with this value is left out of
            keys, so that the keys of recorded stages stay valid.
        formerly: For a field whose default has changed: its former defaults. Recorded recipes and keys contain the
            value already.
        renamed_from: The field's former name. Recipes may contain it, and keys always do, so that the keys of recorded
            stages stay valid.
        live: see `is_live`.
    """
    history = {} if before is ALWAYS_THERE else {"before": before}
    history |= {"formerly": list(formerly)} if formerly else {}
    history |= {"renamed_from": renamed_from} if renamed_from else {}
    return Field(
        default, description=description, json_schema_extra={"semantic": True, "live": live, **history}, **bounds
    )


def operational(default: Any, *, description: str, live: bool = False, **bounds: Any) -> Any:
    """A field that changes how, where or how fast something is computed, never what: it is part of no key."""
    return Field(default, description=description, json_schema_extra={"semantic": False, "live": live}, **bounds)


def section(model: type[Section], description: str) -> Any:
    """A nested section whose fields all have defaults; each field declares whether it is semantic."""
    return Field(default_factory=model, description=description, json_schema_extra={"semantic": True})


def is_semantic(info: FieldInfo) -> bool:
    return bool(_extra(info).get("semantic"))


def is_live(info: FieldInfo) -> bool:
    """Whether `arealflow set` may change the field of a run in progress."""
    return bool(_extra(info).get("live"))


def before(info: FieldInfo) -> Any:
    """The value equivalent to runs from before the field existed; `ALWAYS_THERE` if it was not added later."""
    return _extra(info).get("before", ALWAYS_THERE)


def former_values(info: FieldInfo) -> list[Any]:
    """The values, besides today's default, that runs may have which did not set the field."""
    earlier = before(info)
    return [*([] if earlier is ALWAYS_THERE else [earlier]), *_extra(info).get("formerly", [])]


def former_name(info: FieldInfo) -> str:
    """The field's name in recipes and keys of earlier versions; empty if it was never renamed."""
    return str(_extra(info).get("renamed_from", ""))


def same_field(model: type[BaseModel], name: str) -> set[str]:
    """Both names of the section's field `name`, if the field was renamed."""
    names = ({current, former_name(info)} for current, info in model.model_fields.items() if former_name(info))
    return next((both for both in names if name in both), set())


def with_current_names(values: Mapping[str, Any], model: type[Section]) -> dict[str, Any]:
    """A section's values with today's names of its fields. ValueError if a field has both of its names."""
    former = {former_name(info): name for name, info in model.model_fields.items() if former_name(info)}
    for old, name in former.items():
        if old in values and name in values:
            raise ValueError(f"{old} is the former name of {name}; give one of them")
    return {former.get(name, name): value for name, value in values.items()}


def is_default(info: FieldInfo, value: Any) -> bool:
    return bool(value == info.get_default(call_default_factory=True))


def is_set(info: FieldInfo, value: Any) -> bool:
    """Whether `value` was set explicitly: neither today's default nor a former one, which a resumed run may have."""
    return not is_default(info, value) and value not in former_values(info)


def nested_section(info: FieldInfo) -> type[Section] | None:
    """The section type of a field, also of an optional one; None for a field with a plain value."""
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
