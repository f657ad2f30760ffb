"""The folders of models that benchmarks know by name: a config.json each, served with random weights."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).parent / "models"


def model_names() -> list[str]:
    """Of all of them."""
    return sorted(path.name for path in MODELS.iterdir())


def model_folder(model: str) -> Path:
    """The folder of that name, else the path that it is."""
    folder = MODELS / model
    return folder if folder.is_dir() else Path(model)
