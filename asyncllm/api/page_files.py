"""The page's files, with the headers that they are served under. Nothing in them comes from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import PurePath

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS: Mapping[str, str] = {
    # `data:` is the icon. Nothing inline, nothing from outside, and no other site may frame it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, ready to be sent."""

    body: bytes
    content_type: str
    headers: Mapping[str, str]


@cache
def page_files() -> Mapping[str, PageFile]:
    """Every file of the page, by its path below the app: the page itself under "/", the others under "/page/".

    The page's addresses are relative, so it works under any prefix, if its own address ends with a slash.
    """
    found = {}
    for entry in sorted((files("asyncllm") / "api" / "page").iterdir(), key=lambda entry: entry.name):
        content_type = _TYPES.get(PurePath(entry.name).suffix)
        if content_type is not None:
            body = entry.read_bytes()
            tag = blake2b(body, digest_size=12).hexdigest()
            headers = {**SECURITY_HEADERS, "etag": f'"{tag}"', "cache-control": "no-cache"}
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = PageFile(body, content_type, headers)
    return found
