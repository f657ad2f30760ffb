"""Every example runs, says what it should, is short, and uses public names only."""

from __future__ import annotations

import ast
import contextlib
import runpy
import sys
from pathlib import Path

import pytest

import asyncllm
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

# a line that each prints
SAYS = {
    "agent": "agent, answer: ",
    "classification": "label: ",
    "extraction": "complaint of ",
    "logits_processor": "advice kept: True",
    "offline": "32 plus 32 is'",
    "property_test": "\nOK\n",
    "shared_prefix": "prefix hit rate: 9",
    "streaming": "[Name three colours.] done: ",
    "timeout": "blocks still held: 0",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose context has room for the longest prompt of the examples."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, chat_template=CHAT_TEMPLATE, config={"max_position_embeddings": 4096})
    return str(folder)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [] if path.stem == "property_test" else [tiny]
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with contextlib.suppress(SystemExit):  # unittest's way to end
        runpy.run_path(str(path), run_name="__main__")
    shown = "".join(capfd.readouterr())
    assert SAYS[path.stem] in shown


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_uses_public_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 50
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "asyncllm":
            assert {alias.name for alias in node.names} <= set(asyncllm.__all__)
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            assert not name.startswith("_") or name == "__name__"
