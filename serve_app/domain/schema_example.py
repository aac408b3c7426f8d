"""Example values of JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VALUES = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "null": None}
_MAX_DEPTH = 8


def example_value(schema: Mapping[str, Any]) -> Any:
    """Return a value that a JSON schema of pydantic describes; limits of numbers and texts are approximate.

    An example, a default or a constant of the schema is used where it has one.
    """
    return _example(schema, schema.get("$defs", {}), _MAX_DEPTH)


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    if depth == 0:
        return None
    if "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return _example(alternatives[0], definitions, depth - 1)
    kind = schema.get("type", "object")
    if kind == "object":
        required = set(schema.get("required", ()))
        return {
            name: _example(field, definitions, depth - 1)
            for name, field in schema.get("properties", {}).items()
            if name in required
        }
    if kind == "array":
        item = _example(schema.get("items") or {"type": "number"}, definitions, depth - 1)
        return [item] * max(1, int(schema.get("minItems", 1)))
    value = _VALUES.get(kind)
    return schema.get("minimum", value) if kind in ("integer", "number") else value
