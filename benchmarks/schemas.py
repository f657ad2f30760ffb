"""Two hundred JSON schemas of the kinds that applications have, from ten families: the same ones at each call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
SEED = 2026
EACH = 20

WORDS = """
account address amount attendee author billing brand budget carrier category channel city comment
company contact country coupon created currency customer department description discount duration
email event expires feature filename gender height host id invoice item key label language latitude
level limit location manager material message method model name notes order owner parent path
payment phone plan port price priority product project quantity rating reason region release
reminder report retries role salary score section sender severity size source stage start status
street subject summary supplier tag target team timeout title total tracking type unit url user
value vendor version warehouse weight width zone
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class NamedSchema:
    name: str
    schema: Schema


def application_schemas() -> list[NamedSchema]:
    found = []
    for family, make in FAMILIES.items():
        rng = random.Random(f"{SEED} {family}")
        found += [NamedSchema(f"{family}-{i}", make(rng)) for i in range(EACH)]
    return found


def _text(rng: random.Random) -> Schema:
    kind = rng.randrange(6)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        return {"type": "string", "minLength": 1, "maxLength": rng.choice([20, 40, 80, 200])}
    if kind == 2:
        return {"enum": rng.sample(WORDS, rng.randint(2, 8))}
    if kind == 3:
        return {"type": "string", "format": rng.choice(["date", "date-time", "email", "uuid", "uri", "ipv4", "time"])}
    if kind == 4:
        patterns = [
            "^[A-Z]{3}-[0-9]{4}$",
            "^#[0-9a-f]{6}$",
            "^[a-z0-9]+(-[a-z0-9]+)*$",
            r"^\+?[0-9 ]{6,15}$",
            "^v\\d+\\.\\d+$",
        ]
        return {"type": "string", "pattern": rng.choice(patterns), "maxLength": 40}
    return {"type": ["string", "null"], "maxLength": 30}


def _number(rng: random.Random) -> Schema:
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "integer"}
    if kind == 1:
        return {"type": "integer", "minimum": 0, "maximum": rng.choice([5, 10, 100, 65535])}
    if kind == 2:
        return {"type": "number", "minimum": -90, "maximum": 90}
    if kind == 3:
        return {"type": "number", "exclusiveMinimum": 0, "multipleOf": rng.choice([0.01, 0.5, 5])}
    return {"type": "number"}


def _leaf(rng: random.Random) -> Schema:
    kind = rng.random()
    leaf = _text(rng) if kind < 0.55 else _number(rng) if kind < 0.85 else {"type": "boolean"}
    if rng.random() < 0.3:
        leaf = {**leaf, "description": f"the {rng.choice(WORDS)} of the {rng.choice(WORDS)}"}
    return leaf


def _record(rng: random.Random, least: int, most: int, inner: Callable[[random.Random], Schema] = _leaf) -> Schema:
    names = rng.sample(WORDS, rng.randint(least, most))
    return {
        "type": "object",
        "properties": {name: inner(rng) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _list(rng: random.Random, items: Schema, most: int = 5) -> Schema:
    return {"type": "array", "items": items, "minItems": rng.randint(0, 1), "maxItems": rng.randint(2, most)}


def _extraction(rng: random.Random) -> Schema:
    return {**_record(rng, 3, 9), "title": "Extraction"}


def _payload(rng: random.Random) -> Schema:
    record = _record(rng, 4, 10)
    record["properties"]["links"] = _list(rng, {"type": "string", "format": "uri"}, 3)
    record["properties"]["page"] = _record(rng, 2, 4, _number)
    return record


def _order(rng: random.Random) -> Schema:
    lines = _list(rng, {"$ref": "#/$defs/line"}, 6)
    return {
        "$defs": {"line": _record(rng, 3, 6), "address": _record(rng, 3, 6, _text)},
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "lines": {**lines, "minItems": 1},
            "ship_to": {"$ref": "#/$defs/address"},
            "bill_to": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
        },
        "required": ["id", "lines", "ship_to"],
        "additionalProperties": False,
    }


def _configuration(rng: random.Random) -> Schema:
    def section(rng: random.Random) -> Schema:
        return {**_record(rng, 2, 6), "required": []}

    return {**_record(rng, 3, 6, section), "$schema": "http://json-schema.org/draft-07/schema#"}


def _tool_call(rng: random.Random) -> Schema:
    names = rng.sample(WORDS, rng.randint(2, 5))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"get_{name}"}, "arguments": _record(rng, 1, 5)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"oneOf": calls}


def _events(rng: random.Random) -> Schema:
    kinds = rng.sample(WORDS, rng.randint(2, 6))
    definitions = {}
    for kind in kinds:
        definition = _record(rng, 1, 5)
        definition["properties"] = {"kind": {"const": kind}, **definition["properties"]}
        definition["required"] = ["kind", *(name for name in definition["required"] if name != "kind")]
        definitions[kind] = definition
    union = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], "discriminator": {"propertyName": "kind"}}
    return {"$defs": definitions, **_list(rng, union, 4)}


def _tree(rng: random.Random) -> Schema:
    node = _record(rng, 1, 3)
    node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/definitions/node"}, "maxItems": 2}
    return {"definitions": {"node": node}, "$ref": "#/definitions/node"}


def _table(rng: random.Random) -> Schema:
    columns = [_leaf(rng) for _ in range(rng.randint(2, 5))]
    row = {"type": "array", "prefixItems": columns, "items": False, "minItems": len(columns)}
    return {
        "type": "object",
        "properties": {"rows": _list(rng, row, 6), "total": {"type": "integer", "minimum": 0}},
        "required": ["rows", "total"],
        "additionalProperties": False,
    }


def _map(rng: random.Random) -> Schema:
    value = _leaf(rng) if rng.random() < 0.5 else _record(rng, 1, 3)
    if rng.random() < 0.5:
        return {"type": "object", "additionalProperties": value, "minProperties": 1, "maxProperties": 5}
    patterns = {"^[a-z]{1,12}$": value}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False, "maxProperties": 5}


def _open(rng: random.Random) -> Schema:
    record = {**_record(rng, 2, 5), "additionalProperties": _leaf(rng), "maxProperties": 8}
    return {**record, "required": list(record["properties"])}


FAMILIES: dict[str, Callable[[random.Random], Schema]] = {
    "extraction": _extraction,
    "payload": _payload,
    "order": _order,
    "configuration": _configuration,
    "tool-call": _tool_call,
    "events": _events,
    "tree": _tree,
    "table": _table,
    "map": _map,
    "open": _open,
}
