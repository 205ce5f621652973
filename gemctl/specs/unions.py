"""Blocks that are chosen by their `kind`: what makes a union of their specs, and how a `kind` is found.

    layers:
      - sequence: {kind: kunlun, ffn_hidden: 32}
        interaction: {kind: mypackage.specs.MyBlock, options: {tokens: 8}}    # a block of your own

A `kind` with a dot in it is the dotted name of a spec in a package of the user's (gemctl/specs/custom.py).
"""

from typing import Any

from pydantic import ConfigDict, Discriminator

CUSTOM = "custom"


def _kind_is_needed(schema: dict[str, Any]) -> None:
    schema["required"] = list(dict.fromkeys(["kind", *schema.get("required", [])]))


BLOCK = ConfigDict(extra="forbid", json_schema_extra=_kind_is_needed)
"""Of every spec in a union: Python may leave its `kind` out, a file may not."""


def tag(value: Any) -> str | None:
    """The tag of a union's member; None where there is no `kind`."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str):
        return None
    return CUSTOM if "." in kind else kind


BY_KIND = Discriminator(tag)
