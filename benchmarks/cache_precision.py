"""What narrower numbers in the KV cache do to a model's choices: how often its likeliest next token stays the same.

    python -m benchmarks.cache_precision [MODEL] [--pieces 3] [--output FILE]

Pieces of 1,000 tokens of the README go through transformers' model, each position after the text that is there, with
the keys and values rounded as a cache of the engine keeps them: keys after their rotation, and each number once. All
else is float32, and so is what it stands beside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from asyncllm.cli import find_smollm2
from asyncllm.config import EngineConfig
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.weights.source import resolve_source
from benchmarks.peer_transformers import load_transformers

TEXT = Path(__file__).parents[1] / "README.md"
PIECE = 1000  # tokens
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def narrow(x: Tensor) -> Tensor:
    """As `kv_cache_dtype="fp8"` keeps it."""
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def narrow_scaled(x: Tensor) -> Tensor:
    """The same, but with a scale for each token and head [..., dim], by its largest number."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-20) / _LARGEST
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "fp8": narrow,
    "fp8, a scale for each token and head": narrow_scaled,
}


class RoundedCache(DynamicCache):
    """Rounds what it is given."""

    def __init__(self, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._rounding = rounding

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers calls it."""
        keys, values = self._rounding(key_states), self._rounding(value_states)
        updated: tuple[Tensor, Tensor] = super().update(keys, values, *args, **kwargs)
        return updated


@dataclass(frozen=True, slots=True)
class Agreement:
    """One cache beside float32."""

    cache: str
    tokens: int
    equal: int  # of them, those after which the likeliest next one is the same


def measure(model: str, pieces: int) -> list[Agreement]:
    """The agreement of each cache."""
    tokenizer = Tokenizer.load(resolve_source(model, EngineConfig()).tokenizer)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: pieces * PIECE]
    parts = torch.tensor(ids[: len(ids) // PIECE * PIECE or None]).view(-1, min(PIECE, len(ids)))
    loaded = load_transformers(model, torch.float32)
    expected = _likeliest(loaded, parts, lambda x: x)
    return [
        Agreement(name, parts.numel(), int((_likeliest(loaded, parts, rounding) == expected).sum()))
        for name, rounding in ROUNDINGS.items()
    ]


def _likeliest(model: Any, parts: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """After each token of `parts` [pieces, tokens]."""
    found = []
    with torch.inference_mode():
        for part in parts:
            logits = model(part[None], past_key_values=RoundedCache(rounding), use_cache=True).logits
            found.append(logits[0].argmax(-1))
    return torch.stack(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each cache."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_precision", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a Hub id, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--pieces", type=int, default=3)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    model = chosen.model or find_smollm2()
    found = measure(model, chosen.pieces)
    for each in found:
        print(f"{each.cache}: {each.equal / each.tokens:.1%} of {each.tokens:,} next tokens are float32's")
    if chosen.output is not None:
        report = {"model": Path(model).name, "text": TEXT.name, "caches": [asdict(each) for each in found]}
        chosen.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
