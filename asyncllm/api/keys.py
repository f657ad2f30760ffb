"""ApiKeys: who may in, and which prefix cache is theirs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from asyncllm.api.errors import ApiError


class ApiKeys:
    """The keys of one app. Without any, everybody may in.

    Each key has a cache salt of its own: else one tenant could time whether another one's prompt is in the cache.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Mapping[str, str]) -> str | None:
        """The salt of the request's key, None where there are no keys. Raises an `ApiError` of 401."""
        if not self._digests:
            return None
        digest = hashlib.sha256(_sent_key(headers).encode("utf-8", "surrogateescape")).digest()
        found: bytes | None = None
        for known in self._digests:  # all of them: how long it takes says nothing about which one fits
            if hmac.compare_digest(known, digest):
                found = known
        if found is None:
            raise ApiError(
                401,
                "The API key is missing or wrong: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return hashlib.sha256(b"cache salt" + found).hexdigest()[:32]


def _sent_key(headers: Mapping[str, str]) -> str:
    """From `x-api-key`, which Anthropic's clients send, or a bearer token."""
    if key := headers.get("x-api-key"):
        return key
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return ""
