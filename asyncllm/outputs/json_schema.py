"""What of a JSON Schema can be enforced: a keyword is, or is refused by its name and place; annotations are left out.

llguidance compiles what comes out of here. It refuses much by itself; this module refuses what it would take and not
hold exactly, names the place, and rewrites what has an exact equal that it does hold. The dialect is 2020-12, or what
`$schema` says. The facts about llguidance were found with the public JSON Schema Test Suite; the tests repeat them.

Does not belong here: questions about a schema's values (`schema_values`), how JSON is written (`grammar_source`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any

from asyncllm.errors import GrammarError
from asyncllm.outputs.schema_patterns import (
    FORMATS,
    INTEGER_FORMATS,
    NATIVE_FORMATS,
    UNCHECKED_FORMATS,
    ecma_pattern,
    has_control,
)
from asyncllm.outputs.schema_values import TYPES, Place, SchemaDocument, types_of

Json = Any
Node = dict[str, Any]

MAX_MULTIPLE = 10_000
"""Of the least common multiple of all multipleOf, without its factors 2 and 5: what an automaton has states for."""
MAX_PROPERTIES = 1_000
"""Of one schema, and of a whole document with an allOf, which may put them together: what they cost is quadratic."""
MAX_ONE_OF = 64
"""Alternatives of a oneOf whose pairs are compared."""
MAX_ARRANGEMENTS = 2_000
"""Arrays that all uniqueItems of a document are written out to: 0.3 s to compile."""

_DIALECTS = tuple(
    f"//json-schema.org/{name}/schema"
    for name in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
)
_IDENTITY = frozenset({"$id", "id", "$anchor"})
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment")
) | frozenset(("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs"))
"""They say nothing about which values are valid (`discriminator` and the like are OpenAPI's)."""
_NEUTRAL: Mapping[str, Json] = {
    "nullable": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
    "propertyNames": True,
}
"""Keywords that cannot be enforced, and the value with which they say nothing."""
_WITHOUT = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that say nothing where the other one is not there."""

_SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ARRAY_FORMS = frozenset({"enum", "const", "prefixItems"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


CheckPattern = Callable[[str], str | None]
"""What is wrong with a pattern, as a regular expression of llguidance; None if nothing is."""


def enforceable_schema(schema: Json, check_pattern: CheckPattern = lambda pattern: None) -> Json:
    """A schema that allows what `schema` allows, made of what llguidance holds exactly. `schema` is used up.

    Raises `GrammarError`, which names the keyword and its place.
    """
    return _Rewriting(schema, check_pattern).run()


class _Rewriting:
    """Of one document, in place: so that references into it stay what they are."""

    def __init__(self, root: Json, check_pattern: CheckPattern) -> None:
        self._check_pattern = check_pattern
        self._document = SchemaDocument(root)
        self._multiple = 1
        self._names = 0  # in all properties
        self._arrangements = 0
        self._keywords: Mapping[str, Callable[[Node, Json, str], None]] = {
            "type": self._type,
            "enum": self._enum,
            "const": lambda node, value, where: _check_values([value], where),
            "multipleOf": self._multiple_of,
            "pattern": self._pattern,
            "format": self._format,
            "required": self._required,
            "uniqueItems": self._flag,
            "minProperties": self._min_properties,
            "$ref": self._reference,
            "$schema": self._dialect,
            **dict.fromkeys(_NUMBERS, self._bound),
            **dict.fromkeys(_COUNTS - {"minProperties"}, self._count),
        }

    def run(self) -> Json:
        document = self._document
        self._visit(document.root, "#", document.root)
        for place in document.places.values():
            if "$ref" in place.node:
                self._check_target(place.node, f"{place.path}/$ref")
        if self._names > MAX_PROPERTIES and any("allOf" in place.node for place in document.places.values()):
            raise _error("#", f"over {MAX_PROPERTIES:,} properties, with an allOf, cannot be enforced")
        endless = document.endless()
        if endless is not None:
            raise _error(endless, "this schema needs itself without end, so that no value satisfies it")
        for place in document.places.values():
            if "oneOf" in place.node:
                self._one_of(place.node, f"{place.path}/oneOf")
        for place in document.places.values():
            if "uniqueItems" in place.node:
                self._unique_items(place.node, f"{place.path}/uniqueItems")
        return document.root

    def _visit(self, schema: Json, path: str, root: Json) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _error(path, f"a schema is an object or a boolean, got {schema!r:.80}")
        if isinstance(schema.get("$id"), str) and not schema["$id"].startswith("#"):
            root = schema
        self._document.places[id(schema)] = Place(schema, path, root)
        for keyword in list(schema):
            if keyword in schema:  # one keyword may take another with it
                self._keyword(schema, keyword, f"{path}/{keyword}")
        for inner_path, inner in _subschemas(schema):
            self._visit(inner, f"{path}/{inner_path}", root)

    def _keyword(self, node: Node, keyword: str, where: str) -> None:
        value = node[keyword]
        if keyword in self._keywords:
            self._keywords[keyword](node, value, where)
        elif keyword in _MAPS or (keyword in _LISTS and isinstance(value, list)) or keyword in _SINGLE:
            self._applicator(node, keyword, where)
        elif keyword in _IDENTITY:
            _check_text(value, where)
        elif (
            keyword in _ANNOTATIONS
            or (keyword.startswith("x-") and keyword != "x-guidance")
            or (keyword in _NEUTRAL and value == _NEUTRAL[keyword])
            or (keyword in _WITHOUT and _WITHOUT[keyword] not in node)
            or (keyword == "if" and not {"then", "else"} & node.keys())
        ):
            del node[keyword]
        else:
            raise _error(where, f"{keyword} cannot be enforced")

    def _applicator(self, node: Node, keyword: str, where: str) -> None:
        value = node[keyword]
        if keyword in _MAPS and not isinstance(value, dict):
            raise _error(where, f"{keyword} must be an object, got {value!r:.80}")
        if keyword == "properties":
            self._names += len(value)
            if len(value) > MAX_PROPERTIES:
                raise _error(where, f"over {MAX_PROPERTIES:,} properties cannot be enforced")
        if keyword in ("anyOf", "oneOf", "allOf") and not value:
            raise _error(where, f"{keyword} must not be empty")
        if keyword == "patternProperties":
            node[keyword] = {self._translated(pattern, where): inner for pattern, inner in value.items()}

    def _type(self, node: Node, value: Json, where: str) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n in TYPES for n in names):
            raise _error(where, f"type must be one or a list of {', '.join(sorted(TYPES))}, got {value!r:.80}")

    def _enum(self, node: Node, value: Json, where: str) -> None:
        if not isinstance(value, list) or not value:
            raise _error(where, f"enum must be a list of at least one value, got {value!r:.80}")
        _check_values(value, where)

    def _bound(self, node: Node, value: Json, where: str) -> None:
        if isinstance(value, bool) and where.endswith(("exclusiveMinimum", "exclusiveMaximum")):
            return  # of draft 4
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _error(where, f"a bound must be a number, got {value!r:.80}")
        _check_values([value], where)

    def _multiple_of(self, node: Node, value: Json, where: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise _error(where, f"multipleOf must be a number above 0, got {value!r:.80}")
        states = Fraction(Decimal(repr(value))).numerator
        for factor in (2, 5):
            while states % factor == 0:
                states //= factor
        self._multiple = math.lcm(self._multiple, states)
        if self._multiple > MAX_MULTIPLE:
            raise _error(where, f"multipleOf cannot be enforced: {value!r:.80} (with the others) is too intricate")

    def _count(self, node: Node, value: Json, where: str) -> None:
        if isinstance(value, float) and value.is_integer():
            node[where.rpartition("/")[2]] = value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _error(where, f"a count must be a whole number from 0 on, got {value!r:.80}")

    def _min_properties(self, node: Node, value: Json, where: str) -> None:
        self._count(node, value, where)
        named = node.get("required")
        required = len(set(named)) if isinstance(named, list) and all(isinstance(n, str) for n in named) else 0
        if node["minProperties"] <= required:
            del node["minProperties"]
        elif node["minProperties"] > 1:  # nothing would keep two further properties from having one name
            raise _error(where, "minProperties above 1 cannot be enforced, unless as many properties are required")

    def _pattern(self, node: Node, value: Json, where: str) -> None:
        _check_text(value, where)
        node["pattern"] = self._translated(value, where)

    def _translated(self, pattern: str, where: str) -> str:
        try:
            translated = ecma_pattern(pattern)
        except ValueError as error:
            wrong: str | None = str(error)
        else:
            wrong = self._check_pattern(translated)
            if wrong is None:
                return translated
        raise _error(where, f"pattern {pattern!r:.80} cannot be enforced: {wrong}")

    def _format(self, node: Node, value: Json, where: str) -> None:
        _check_text(value, where)
        if value in FORMATS:
            del node["format"]
            self._also(node, {"pattern": FORMATS[value]})
        elif value in INTEGER_FORMATS:
            bound = INTEGER_FORMATS[value]
            del node["format"]
            self._also(node, {"minimum": -bound, "maximum": bound - 1})
        elif value in UNCHECKED_FORMATS:
            del node["format"]
        elif value not in NATIVE_FORMATS:
            raise _error(where, f"format {value!r:.80} cannot be enforced")

    def _also(self, node: Node, further: Node) -> None:
        if node.keys().isdisjoint(further):
            node.update(further)
        else:
            node["allOf"] = [*node.get("allOf", ()), further]

    def _required(self, node: Node, value: Json, where: str) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _error(where, f"required must be a list of names, got {value!r:.80}")

    def _flag(self, node: Node, value: Json, where: str) -> None:
        name = where.rpartition("/")[2]
        if not isinstance(value, bool):
            raise _error(where, f"{name} must be true or false, got {value!r:.80}")
        if not value:
            del node[name]

    def _dialect(self, node: Node, value: Json, where: str) -> None:
        _check_text(value, where)
        if value.rstrip("#").partition(":")[2] not in _DIALECTS:
            raise _error(where, f"$schema {value!r:.80} is not a dialect that is known here")

    def _reference(self, node: Node, value: Json, where: str) -> None:
        _check_text(value, where)

    def _check_target(self, node: Node, where: str) -> None:
        """Only what was rewritten may be referred to: the value of a const, say, would be taken as it stands."""
        reference = node["$ref"]
        if reference != "#" and not reference.startswith("#/"):
            return  # an anchor or an id, which only a schema has
        try:
            target = self._document.target(node)
        except LookupError:
            raise _error(where, f"$ref {reference!r:.80} points to nothing") from None
        if not isinstance(target, bool) and id(target) not in self._document.places:
            raise _error(where, f"$ref {reference!r:.80} points to something that is no schema")

    def _one_of(self, node: Node, where: str) -> None:
        """Where no two alternatives share a value, oneOf is anyOf. llguidance proves some cases itself."""
        alternatives = node["oneOf"]
        if len(alternatives) > MAX_ONE_OF:
            raise _error(where, f"oneOf of over {MAX_ONE_OF} alternatives cannot be enforced; anyOf can")
        if not all(self._document.disjoint(a, b) for a, b in combinations(alternatives, 2)):
            return
        if "anyOf" in node:
            return
        renamed = {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in node.items()}
        node.clear()
        node.update(renamed)  # in its place: the order of keywords is that of properties

    def _unique_items(self, node: Node, where: str) -> None:
        """It says nothing where no two items can be equal; an array of few known values is written out."""
        document = self._document
        del node["uniqueItems"]
        if "array" not in types_of(node) or node.get("maxItems", 2) <= 1 or document.differ(node):
            return
        values = document.listed(node.get("items", True))
        if values is None or node.get("type") != "array" or not node.keys().isdisjoint(_ARRAY_FORMS):
            raise _error(where, "uniqueItems cannot be enforced, but of items that are an enum")
        sizes = range(node.pop("minItems", 0), min(node.pop("maxItems", len(values)), len(values)) + 1)
        self._arrangements += sum(math.perm(len(values), size) for size in sizes)
        if self._arrangements > MAX_ARRANGEMENTS:
            raise _error(where, f"uniqueItems cannot be enforced: over {MAX_ARRANGEMENTS:,} arrays satisfy it")
        if not sizes:
            raise _error(where, f"uniqueItems: there are but {len(values)} values, and minItems asks for more")
        node.pop("items")
        node["enum"] = [[*items] for size in sizes for items in permutations(values, size)]


def _subschemas(node: Node) -> Iterator[tuple[str, Json]]:
    """The schemas right inside a schema, each with its place in it."""
    for keyword, value in list(node.items()):
        if keyword in _LISTS and isinstance(value, list):
            for i, item in enumerate(value):
                yield f"{keyword}/{i}", item
        elif keyword in _SINGLE:
            yield keyword, value
        elif keyword in _MAPS:
            for name, item in value.items():
                yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", item
        elif keyword in _LISTS:
            raise _error(keyword, f"{keyword} must be a list, got {value!r:.80}")


def _check_values(values: list[Json], where: str) -> None:
    """llguidance has numbers as doubles: one that is none would be written as its neighbour. And it leaves control
    characters that have no short escape out of a text."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                exact = int(float(value)) == value
            except OverflowError:
                exact = False
            if not exact:
                raise _error(where, f"{value!r:.80} cannot be enforced: no double is this number")
        elif isinstance(value, str) and has_control(value):
            raise _error(where, f"the control character in {value!r:.80} cannot be written")
        elif isinstance(value, list | dict):
            _check_values([*(value.values() if isinstance(value, dict) else value)], where)


def _check_text(value: Json, where: str) -> None:
    if not isinstance(value, str):
        raise _error(where, f"{where.rpartition('/')[2]} must be a text, got {value!r:.80}")


def _error(where: str, what: str) -> GrammarError:
    return GrammarError(f"json_schema: {what} (at {where})")
