"""The public names, the version, the marker for types and the logger."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import asyncllm

ROOT = Path(__file__).parent.parent


def test_public_names_load_from_their_homes() -> None:
    assert set(asyncllm.__all__) == set(asyncllm._HOMES)
    for name in asyncllm.__all__:
        assert getattr(asyncllm, name) is getattr(import_module(asyncllm._HOMES[name]), name)
    assert set(asyncllm.__all__) <= set(dir(asyncllm))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'asyncllm' has no attribute 'Engine'"):
        _ = asyncllm.Engine


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert asyncllm.__version__ == project["version"] == version("asyncllm")


def test_package_is_typed() -> None:
    assert (Path(asyncllm.__file__).parent / "py.typed").is_file()


def test_logger_is_silent_until_the_application_configures_it() -> None:
    code = (
        "import asyncllm, logging; logging.getLogger('asyncllm.engine').error('unseen');"
        "assert [type(handler) for handler in logging.getLogger('asyncllm').handlers] == [logging.NullHandler]"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == run.stderr == ""


def test_import_leaves_logging_alone() -> None:
    code = (
        "import logging; root = logging.getLogger(); before = (root.level, list(root.handlers)); import asyncllm;"
        "assert (root.level, list(root.handlers)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dependencies_are_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for group in project["optional-dependencies"].values() for r in group)]
    assert [r for r in wanted if "==" in r.split(";")[0]] == []


@pytest.mark.parametrize("missing", ["aiohttp", "prometheus_client", "pydantic"])
@pytest.mark.parametrize("name", ["create_aiohttp_app", "create_asgi_app"])
def test_the_api_names_what_it_needs(name: str, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom asyncllm import api, errors\n"
    code += f"try: api.{name}\nexcept errors.DependencyError as error: print(error)\nelse: print('all there')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needless = missing == "aiohttp" and name == "create_asgi_app"
    wanted = "all there" if needless else f"the API needs {missing}: pip install 'asyncllm[api]'"
    assert run.stdout.strip() == wanted
