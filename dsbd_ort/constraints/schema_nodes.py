"""Schemas within a JSON schema, and the schemas that use each of them."""

from collections.abc import Iterator, Mapping
from typing import Any

LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords that may hold a list of schemas."""
_ONE = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
_CROWDED = 50  # properties
_MOST_CROWDED = 8


def children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Return the schemas directly within a schema, its definitions left out."""
    yield from (schema[key] for key in _ONE if key in schema)
    for key in LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()


def referred(root: Mapping[str, Any], reference: object) -> Any:
    """Return the target of a reference within the document, None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def users_of_schemas(
    root: Mapping[str, Any],
) -> tuple[list[Mapping[str, Any]], dict[int, list[int]]]:
    """Return the schemas of a document, and by the ``id`` of each the ids of its users."""
    users: dict[int, list[int]] = {id(root): []}
    found = [root]
    for schema in found:  # which grows meanwhile
        for child in (*children(schema), referred(root, schema.get("$ref"))):
            if isinstance(child, Mapping):
                if id(child) not in users:
                    users[id(child)] = []
                    found.append(child)
                users[id(child)].append(id(schema))
    return found, users


def crowded_parts(root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects with the most properties below the root, each a schema by itself."""
    crowded = [
        schema
        for schema in users_of_schemas(root)[0][1:]
        if isinstance(schema.get("properties"), Mapping) and len(schema["properties"]) > _CROWDED
    ]
    crowded.sort(key=lambda schema: -len(schema["properties"]))
    definitions = {key: root[key] for key in (*DEFINITIONS, "x-guidance") if key in root}
    return [{**definitions, **schema} for schema in crowded[:_MOST_CROWDED]]
