"""Questions about the values that a JSON Schema allows, answered as far as they can be without listing them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Json = Any
Node = dict[str, Any]

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MAX_DEPTH = 8
"""Of the proof that two schemas share no value."""
_SMALL: Mapping[str, Sequence[Json]] = {"boolean": (True, False), "null": (None,)}
"""The types of few values."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a schema stands."""

    node: Node
    path: str
    """From the document's root, as a JSON pointer."""
    root: Json
    """The schema that pointers in this one start from: the nearest around it that has an `$id`, or the document."""


class SchemaDocument:
    """The schemas of one document, with what their references point to."""

    def __init__(self, root: Json) -> None:
        self.root = root
        self.places: dict[int, Place] = {}
        """By the id of a schema; every schema of the document, each before those inside it."""

    def target(self, node: Node) -> Json:
        """What a schema's `$ref` points to. Raises `LookupError` if that is nothing, or if it is no JSON pointer."""
        reference = node["$ref"]
        if reference != "#" and not reference.startswith("#/"):
            raise LookupError(reference)
        target = self.places[id(node)].root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name)] if isinstance(target, list) else target[name]
            except (ValueError, TypeError, IndexError) as error:
                raise LookupError(reference) from error
        return target

    def endless(self) -> str | None:
        """The path of a schema that no finite value satisfies, because it is or needs itself; None if there is none.

        One that nothing satisfies for another reason is not meant: llguidance finds those.
        """
        places = self.places
        finite: set[int] = set()
        waiting: dict[int, list[int]] = {}  # id of a schema -> those to look at again once it is known to be finite
        look = list(places)  # from its end, where the inner schemas are
        while look:
            key = look.pop()
            if key in finite:
                continue
            missing = self._missing(places[key].node, finite)
            for other in missing:
                waiting.setdefault(other, []).append(key)
            if not missing:
                finite.add(key)
                look += waiting.pop(key, ())
        return next((place.path for key, place in places.items() if key not in finite), None)

    def _missing(self, node: Node, finite: set[int]) -> list[int]:
        """The ids of schemas whose finiteness would help to say that this one has a finite value; empty if it has."""

        def unknown(schemas: Iterable[Json]) -> Iterator[int]:
            return (id(schema) for schema in schemas if isinstance(schema, dict) and id(schema) not in finite)

        if "const" in node or "enum" in node:
            return []
        needed = [*node.get("allOf", ()), *self._known_target(node)]
        for key in unknown(needed):
            return [key]
        for keyword in ("anyOf", "oneOf"):
            options = node.get(keyword, ())
            missing = [*unknown(options)]
            if options and len(missing) == len(options):
                return missing
        types = types_of(node)
        if types - {"object", "array"}:
            return []
        missing = []
        for name, parts in (("object", _required(node)), ("array", _first_items(node))):
            if name in types:
                first = next(unknown(parts), None)
                if first is None:
                    return []
                missing.append(first)
        return missing

    def _known_target(self, node: Node) -> Iterator[Json]:
        """What a reference points to, where this can be told here; llguidance resolves the others, or refuses them."""
        if "$ref" in node:
            with suppress(LookupError):
                yield self.target(node)

    def disjoint(self, a: Json, b: Json, depth: int = 0) -> bool:
        """Whether it is certain that no value satisfies both."""
        if depth > _MAX_DEPTH:
            return False
        a, b = self._followed(a), self._followed(b)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            for keyword in ("anyOf", "oneOf"):
                if keyword in one and all(self.disjoint(part, other, depth + 1) for part in one[keyword]):
                    return True
            if any(self.disjoint(part, other, depth + 1) for part in one.get("allOf", ())):
                return True
        types = types_of(a), types_of(b)
        if not types[0] & types[1] and not ({"integer", "number"} <= types[0] | types[1]):
            return True
        values = _values(a), _values(b)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        if types[0] == types[1] == {"object"}:
            shared = set(a.get("required", ())) & set(b.get("required", ()))
            return any(self.disjoint(_property(a, name), _property(b, name), depth + 1) for name in shared)
        return False

    def differ(self, node: Node) -> bool:
        """Whether it is certain that no array of this schema has two equal items."""
        items = node.get("items", True)
        prefix, rest = node.get("prefixItems", []), items
        if isinstance(items, list):
            prefix, rest = items, node.get("additionalItems", True)
        if rest is not False and node.get("maxItems", math.inf) > len(prefix):
            return False
        return all(self.disjoint(a, b) for a, b in combinations(prefix, 2))

    def listed(self, schema: Json, depth: int = 0) -> list[Json] | None:
        """All values that it allows, each once; None where they cannot be listed so simply."""
        schema = self._followed(schema)
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        keywords = schema.keys()
        found: list[Json] = []
        if keywords == {"anyOf"}:
            for part in schema["anyOf"]:
                values = self.listed(part, depth + 1)
                if values is None:
                    return None
                found += values
        elif keywords in ({"enum"}, {"const"}, {"type", "enum"}, {"type", "const"}):
            stated = frozenset(types_of(schema))
            wide = stated | {"integer"} if "number" in stated else stated
            found = [value for value in schema.get("enum", [schema.get("const")]) if type_of(value) in wide]
        elif keywords == {"type"} and types_of(schema) <= _SMALL.keys():
            found = [value for name in sorted(types_of(schema)) for value in _SMALL[name]]
        else:
            return None
        return [*{_canonical(value): value for value in reversed(found)}.values()][::-1]

    def _followed(self, schema: Json) -> Json:
        """Past references that stand alone."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or "type" in schema:
                break
            try:
                schema = self.target(schema)
            except LookupError:
                break
        return schema


def types_of(node: Node) -> frozenset[str]:
    """The JSON types that its own `type`, `enum` or `const` leaves."""
    stated = node.get("type")
    if stated is not None:
        return frozenset([stated] if isinstance(stated, str) else stated)
    values = node.get("enum", [node["const"]] if "const" in node else None)
    return TYPES if values is None else frozenset(map(type_of, values))


def type_of(value: Json) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _values(node: Node) -> frozenset[str] | None:
    """The only values that it allows, in a form that equal values share; None where that is not known."""
    values = node.get("enum", [node["const"]] if "const" in node else None)
    return None if values is None else frozenset(_canonical(value) for value in values)


def _canonical(value: Json) -> str:
    def plain(item: Json) -> Json:
        if isinstance(item, float) and item.is_integer():
            return int(item)
        if isinstance(item, list):
            return [plain(inner) for inner in item]
        if isinstance(item, dict):
            return {name: plain(inner) for name, inner in item.items()}
        return item

    return json.dumps(plain(value), sort_keys=True)


def _property(node: Node, name: str) -> Json:
    if name in node.get("properties", {}):
        return node["properties"][name]
    return True if "patternProperties" in node else node.get("additionalProperties", True)


def _required(node: Node) -> Iterator[Json]:
    for name in node.get("required", ()):
        yield _property(node, name)


def _first_items(node: Node) -> Iterator[Json]:
    least = node.get("minItems", 0)
    items = node.get("items", True)
    prefix = items if isinstance(items, list) else node.get("prefixItems", ())
    yield from prefix[:least]
    if least > len(prefix):
        yield node.get("additionalItems", True) if isinstance(items, list) else items
