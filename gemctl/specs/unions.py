"""Blocks chosen by their `kind`: how a union of their specs is validated.

    layers:
      - sequence: {kind: kunlun, ffn_hidden: 32}
        interaction: {kind: mypackage.specs.MyBlock, options: {tokens: 8}}    # a block of your own

A `kind` with a dot in it is the dotted name of a spec in a package of the user's (gemctl/specs/custom.py).

    AttentionSpec = Annotated[JaggedAttentionSpec | BlockAttentionSpec, BY_KIND]
"""

from typing import Annotated, Any, Union, get_args

from pydantic import ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

CUSTOM = "custom"


def _kind_is_needed(schema: dict[str, Any]) -> None:
    schema["required"] = list(dict.fromkeys(["kind", *schema.get("required", [])]))


BLOCK = ConfigDict(extra="forbid", json_schema_extra=_kind_is_needed)
"""Configuration of every spec in a union: Python may leave its `kind` out, a file may not."""


def tag(value: Any) -> str | None:
    """The tag of a union's member; None where there is no `kind`."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str):
        return None
    return CUSTOM if "." in kind else kind


class _ByKind:
    """Makes a union of specs a tagged one; each spec's tag is the default of its `kind`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = tuple(Annotated[spec, Tag(getattr(spec, "kind", CUSTOM))] for spec in get_args(source))
        return handler.generate_schema(Annotated[Union[tagged], Discriminator(tag)])  # noqa: UP007


BY_KIND = _ByKind()


def specs_of(union: Any) -> tuple[Any, ...]:
    """The specs of a union that is annotated with BY_KIND."""
    return get_args(get_args(union)[0])
