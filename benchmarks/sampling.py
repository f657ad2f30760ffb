"""Sampling on a GPU: times of whole batches beside reading the logits once, and beside a sampler that sorts.

    python -m benchmarks.sampling [--rows 256] [--vocabulary 151936] [--sweep] [--output FILE]

Times are of many launches replayed from a CUDA graph, over copies of the logits that no cache holds. `--sweep` tries
other sizes of programs than those that the kernels are set to.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType

import torch

from asyncllm.kernels import logit_tiles, sampling, wide_rows
from asyncllm.kernels.compilation import compiling
from asyncllm.kernels.sampled_rows import LogitRows, RowSettings
from benchmarks.kernels import DEVICE, seconds_of

ROUNDS = 8
"""Of the copies, in a graph: so many that the graph's own start takes no part in the figure."""


@dataclass(frozen=True)
class Setting:
    """Of every row of a batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


SETTINGS = {
    "greedy": Setting(temperature=0.0),
    "temperature": Setting(0.7),
    "top-k 50, top-p 0.9": Setting(0.7, 50, 0.9),
    "top-k 20, top-p 0.95, min-p 0.05": Setting(0.6, 20, 0.95, 0.05),
    "top-k 1000, top-p 0.9": Setting(1.0, 1000, 0.9),
    "top-p 0.9": Setting(1.0, 0, 0.9),
    "top-p 0.99": Setting(1.0, 0, 0.99),
    "top-k 40000": Setting(1.0, 40_000),
    "min-p 0.1": Setting(1.0, 0, 1.0, 0.1),
}
# How wide the logits spread: as a language model's that knows what comes, and as one's that does not.
SPREADS = {"peaked": 4.0, "flat": 1.0}
DTYPES = (torch.float32, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_settings(setting: Setting, rows: int) -> RowSettings:
    def fill(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    numbers = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros_like(numbers)
    return RowSettings(
        temperature=fill(setting.temperature, torch.float32),
        top_k=fill(setting.top_k, torch.int32),
        top_p=fill(setting.top_p, torch.float32),
        min_p=fill(setting.min_p, torch.float32),
        seed=numbers.long(),
        choice=zeros,
        suppress_before=zeros,
        num_suppressed=zeros,
        suppressed=zeros[:, None],
    )


def rows_of(rows: int, count: int, vocabulary: int) -> LogitRows:
    """Of so many, the first ones."""
    numbers = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return LogitRows(numbers, numbers, torch.tensor([count], dtype=torch.int32, device=DEVICE), vocabulary)


def launcher(setting: Setting, rows: int, vocabulary: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Samples from logits [rows, vocabulary]."""
    settings = make_settings(setting, rows)
    workspace = sampling.make_sampling_workspace(rows, vocabulary, DEVICE)
    where = rows_of(rows, rows, vocabulary)
    token_ids, row_token_ids = torch.empty_like(where.rows), torch.empty_like(where.rows)

    def launch(logits: torch.Tensor) -> torch.Tensor:
        sampling.sample(
            logits,
            where,
            settings,
            workspace,
            token_ids=token_ids,
            row_token_ids=row_token_ids,
            filters=setting.filters,
        )
        return token_ids

    return launch


def sorting_sampler(setting: Setting) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is commonly written with torch: sort, cut, softmax, and a draw by exponential noise."""

    def launch(logits: torch.Tensor) -> torch.Tensor:
        x = logits.float() / max(setting.temperature, 1e-5)
        if setting.filters:
            x, ids = x.sort(dim=-1, descending=True)
            if setting.top_k:
                x[:, setting.top_k :] = -torch.inf
            shares = x.softmax(dim=-1)
            if setting.top_p < 1.0:
                shares = shares.masked_fill(shares.cumsum(dim=-1) - shares > setting.top_p, 0.0)
            if setting.min_p > 0.0:
                shares = shares.masked_fill(shares < setting.min_p * shares[:, :1], 0.0)
        else:
            ids, shares = None, x.softmax(dim=-1)
        drawn = (shares / torch.empty_like(shares).exponential_()).argmax(dim=-1, keepdim=True)
        return drawn.squeeze(-1) if ids is None else ids.gather(-1, drawn).squeeze(-1)

    return launch


def wrong_tokens(setting: Setting, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> int:
    """How many of the first `count` tokens are not the reference's."""
    rows, vocabulary = logits.shape
    expected = sampling.sample_reference(logits, rows_of(rows, count, vocabulary), make_settings(setting, rows))
    return int((expected != token_ids[:count]).sum())


def make_logits(rows: int, vocabulary: int, dtype: torch.dtype, spread: float) -> list[torch.Tensor]:
    return [(spread * torch.randn((rows, vocabulary), device=DEVICE)).to(dtype) for _ in range(3)]


@contextmanager
def constants(module: ModuleType, **values: int) -> Iterator[None]:
    """The module's sizes, for a while."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True)
class Variant:
    """A choice of sizes."""

    module: ModuleType
    sizes: dict[str, int]
    setting: str
    logits: str  # a key of what is sampled from

    def __str__(self) -> str:
        sizes = ", ".join(f"{name.strip('_').lower()} {value}" for name, value in self.sizes.items())
        return f"{self.module.__name__.rpartition('.')[2]}, {sizes} | {self.setting} | {self.logits}"


def variants() -> Iterator[Variant]:
    programs = ((16, 8, 128), (32, 16, 128), (32, 16, 64), (16, 8, 255), (8, 8, 128), (8, 4, 255))
    for at_once, warps, registers in programs:
        for taken in (4096, 8192):
            sizes = {"_AT_ONCE": at_once, "_WARPS": warps, "_REGISTERS": registers, "_SAMPLE": taken}
            yield Variant(wide_rows, sizes, "top-p 0.9", "flat bfloat16")
    for logits in ("peaked float32", "peaked bfloat16"):
        for at_once, warps in ((8, 2), (8, 4), (16, 2), (16, 4), (16, 8), (32, 4), (32, 8)):
            yield Variant(logit_tiles, {"_AT_ONCE": at_once, "_WARPS": warps}, "temperature", logits)
    for listed, warps, registers in product((4, 8, 16), (4, 8), (96, 168, 255)):
        sizes = {"_LISTED_AT_ONCE": listed, "_DRAW_WARPS": warps, "_DRAW_REGISTERS": registers}
        yield Variant(sampling, sizes, "top-k 50, top-p 0.9", "peaked bfloat16")


def sweep(rows: int, vocabulary: int, *, reading: float) -> None:
    """Print the time of each choice of sizes, and what is wrong of its tokens."""
    found = list(variants())
    shared = {
        f"{kind} {name_of(dtype)}": make_logits(rows, vocabulary, dtype, spread)
        for (kind, spread), dtype in product(SPREADS.items(), DTYPES)
    }
    with compiling(os.cpu_count() or 1):
        for each in found:
            with constants(each.module, **each.sizes):
                launcher(SETTINGS[each.setting], rows, vocabulary)(shared[each.logits][0])
    print("sizes | sampling | logits | µs | x reading | wrong tokens of 2")
    for each in found:
        logits, setting = shared[each.logits], SETTINGS[each.setting]
        with constants(each.module, **each.sizes):
            launch = launcher(setting, rows, vocabulary)
            wrong = wrong_tokens(setting, logits[0].clone(), launch(logits[0]), 2)
            seconds = seconds_of([partial(launch, x) for x in logits * ROUNDS])
        print(f"{each} | {seconds * 1e6:.1f} | {seconds / reading:.2f} | {wrong}", flush=True)


def compile_all(rows: int, vocabulary: int, settings: Iterable[Setting]) -> None:
    """Side by side, before anything is timed."""
    with compiling(os.cpu_count() or 1):
        for setting, dtype in product(settings, DTYPES):
            launcher(setting, rows, vocabulary)(torch.empty((rows, vocabulary), dtype=dtype, device=DEVICE))


def main() -> None:
    """Print a table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows, vocabulary = options.rows, options.vocabulary
    torch.manual_seed(0)
    compile_all(rows, vocabulary, SETTINGS.values())
    floats = make_logits(rows, vocabulary, torch.float32, 1.0)
    reading = seconds_of([partial(torch.amax, x, dim=(0, 1)) for x in floats * ROUNDS])
    least = floats[0].nbytes / 4.45e12
    print(f"reading {rows} x {vocabulary} float32 once: {reading * 1e6:.1f} µs; {least * 1e6:.1f} µs at 4.45 TB/s")
    reading = min(reading, least)
    print("sampling | logits | µs | x reading | sorting µs | wrong tokens of 8")
    table = []
    facts = {"rows": rows, "vocabulary": vocabulary, "reading_seconds": reading}
    facts["device"] = torch.cuda.get_device_name()
    for (name, setting), (kind, spread) in product(SETTINGS.items(), SPREADS.items()):
        for dtype in DTYPES:
            logits = make_logits(rows, vocabulary, dtype, spread)
            launch = launcher(setting, rows, vocabulary)
            wrong = wrong_tokens(setting, logits[0].clone(), launch(logits[0]), min(rows, 8))
            mine = seconds_of([partial(launch, x) for x in logits * ROUNDS])
            sort = (
                seconds_of([partial(sorting_sampler(setting), x) for x in logits]) if dtype == torch.float32 else None
            )
            other = "" if sort is None else f"{sort * 1e6:.0f}"
            label = f"{kind} {name_of(dtype)}"
            print(f"{name} | {label} | {mine * 1e6:.1f} | {mine / reading:.2f} | {other} | {wrong}", flush=True)
            table.append({"sampling": name, "logits": label, "seconds": mine, "sorting_seconds": sort, "wrong": wrong})
            if options.output:  # after each row: a run that is cut short loses nothing
                options.output.write_text(json.dumps({**facts, "table": table}, indent=1) + "\n", encoding="utf-8")
    if options.sweep:
        sweep(rows, vocabulary, reading=reading)


if __name__ == "__main__":
    main()
