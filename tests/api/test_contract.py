"""Requests that nobody would write, made from the OpenAPI document and of random bytes: none brings anything down."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from asyncllm.api import create_asgi_app
from tests.api.asgi_client import request
from tests.api.conftest import MakeEngine
from tests.api.servers import Running, running

CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

LEFT_OUT = ("/engine/events",)  # it never ends
BRIEF = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}


def run_cases(server: Running, examples: int) -> Counter[int]:
    """So many cases for each operation that has a body or a parameter, right ones and wrong ones. Returns how many
    answers had which status."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        if operation.path in LEFT_OUT:
            continue

        @given(case=operation.as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body = {name: BRIEF.get(name, value) for name, value in case.body.items()}
            response = case.call(base_url=server.url, timeout=20)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        check()
    assert server.engine.state == "running"
    return statuses


@pytest.fixture(scope="module")
def limited(shadow: MakeEngine) -> Any:
    with running("uvicorn", shadow, model_names=["m"], max_tokens=4) as server:
        yield server


def test_cases_of_the_document(limited: Running) -> None:
    run_cases(limited, 6)


@pytest.mark.full
def test_two_thousand_cases_of_the_document(limited: Running) -> None:
    statuses = run_cases(limited, 250)
    print(f"{statuses.total()} cases, by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= 2000
    assert max(statuses) < 500


async def test_random_bytes(shadow: MakeEngine) -> None:
    chance = random.Random(7)
    statuses: Counter[int] = Counter()
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"]
    async with shadow() as engine:
        app = create_asgi_app(engine, max_tokens=2)
        for number in range(500):
            body = chance.randbytes(chance.randrange(200))
            if number % 3 == 0:  # nearly JSON
                body = b'{"messages": [{"role": "user", "content": "' + body + b'"}]}'
            answer = await request(app, "POST", chance.choice(paths), body)
            statuses[answer.status] += 1
            assert answer.status in (200, 400), answer.body
            assert answer.status == 200 or isinstance(answer.json["error"]["message"], str)
    print(f"{statuses.total()} bodies, by status: {dict(sorted(statuses.items()))}")
