"""The page's files hold nothing that a strict Content-Security-Policy refuses, and nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser

import pytest

from asyncllm.api.page_files import PageFile, page_files

FILES = page_files()
TEXTS: Mapping[str, str] = {path: file.body.decode() for path, file in FILES.items()}
ADDRESS = re.compile(r"(?:https?:)?//(?!www\.w3\.org/)[\w.-]+", re.IGNORECASE)  # but an SVG's namespace


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = 0  # scripts and styles with a body
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.inline += 1


def faults(html: str) -> list[str]:
    """What the policy would refuse, or a screen reader would not know the name of."""
    elements = Elements(html)
    found = ["inline script or style"] * bool(elements.inline)
    labelled = {attributes.get("for") for tag, attributes in elements.found if tag == "label"}
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    found += [f"id {each} twice" for each in set(ids) if ids.count(each) > 1]
    for tag, attributes in elements.found:
        found += [f"<{tag} {name}>" for name in attributes if name.startswith("on") or name == "style"]
        if tag in ("input", "textarea", "select") and attributes.get("id") not in labelled:
            found.append(f"<{tag} id={attributes.get('id')}> has no label")
        if tag == "button" and "type" not in attributes:
            found.append("<button> without a type")
        for name in ("aria-labelledby", "aria-describedby"):
            found += [f"{name}={each}" for each in (attributes.get(name) or "").split() if each not in ids]
        for name in ("src", "href"):
            address = attributes.get(name) or ""
            local = address.startswith(("data:image/svg+xml", "#")) or f"/{address}" in FILES
            found += [f"{name}={address}"] * (name in attributes and not local)
    return found


def test_the_page_keeps_the_policy() -> None:
    assert faults(TEXTS["/"]) == []
    policy = FILES["/"].headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")


@pytest.mark.parametrize(
    "fault",
    [
        "<script>alert(1)</script>",
        "<style>p { color: red }</style>",
        '<p style="color: red">',
        '<button type="button" onclick="go()">',
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/f.css">',
        '<img src="page/gone.png">',
        "<input id=unnamed>",
        "<button>Go</button>",
        '<p aria-labelledby="nobody">',
        "<p id=prompt>",
    ],
)
def test_a_planted_fault_is_found(fault: str) -> None:
    assert faults(TEXTS["/"] + fault) != []


def test_nothing_comes_from_elsewhere() -> None:
    for path, text in TEXTS.items():
        assert ADDRESS.findall(text) == [], path
        assert "innerHTML" not in text, f"{path}: text of a model must never be markup"
        assert "eval(" not in text
    assert ADDRESS.findall("url(//fonts.example/f.woff)")


def test_files() -> None:
    names = ("page.css", "page.js", "chat.js", "engine.js", "events.js")
    assert set(FILES) == {"/", *(f"/page/{name}" for name in names)}
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript"}
    tags = set()
    for path, file in FILES.items():
        assert isinstance(file, PageFile)
        assert file.content_type == f"{kinds[path.rpartition('.')[2].strip('/')]}; charset=utf-8"
        assert file.headers["x-content-type-options"] == "nosniff"
        tags.add(file.headers["etag"])
    assert len(tags) == len(FILES)
    assert sum(len(file.body) for file in FILES.values()) < 60_000
