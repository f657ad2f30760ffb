"""Runs asyncllm and its peers on the same requests and writes a table and a plot.

python -m benchmarks.compare                          SmolLM2-135M-Instruct on the CPU's workloads
python -m benchmarks.compare --profile gpu --model NAME --engines asyncllm,vllm
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from asyncllm.cli import find_smollm2
from asyncllm.config import EngineConfig
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import PROFILES
from benchmarks.child import Order
from benchmarks.figures import Comparison, Figures, PeerRun, ProductRate, Sample
from benchmarks.peers import PEERS
from benchmarks.products import measure_products
from benchmarks.reference import check_runs
from benchmarks.report import write_report

ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write, and say whether every engine's tokens passed the check."""
    chosen = _parser().parse_args(arguments)
    model = chosen.model or find_smollm2()
    engines = [name for name in chosen.engines.split(",") if name == "asyncllm" or importlib.util.find_spec(name)]
    left_out = [name for name in chosen.engines.split(",") if name not in engines]
    if left_out:
        print(f"not installed, left out: {', '.join(left_out)}", file=sys.stderr)
    vocab_size: int = resolve_source(model, EngineConfig()).config["vocab_size"]
    workloads = PROFILES[chosen.profile]
    names = chosen.workload or list(workloads)
    runs = []
    products: list[ProductRate] = []
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            order = Order(
                engine=engine,
                model=model,
                vocab_size=vocab_size,
                workloads=[workloads[name] for name in names],
                passes=chosen.passes,
                started=time.time(),
                output=str(Path(folder) / "run.json"),
            )
            runs.append(run_child(order))
        if not products and not torch.cuda.is_available():  # beside the first engine, which is compared with them
            products = measure_products(model)
    comparison = Comparison(
        command=shlex.join(["python", "-m", "benchmarks.compare", *(sys.argv[1:] if arguments is None else arguments)]),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        environment=environment(),
        model=Path(model).name,
        profile=chosen.profile,
        passes=chosen.passes,
        runs=runs,
        checks=check_runs(model, runs),
        products=products,
    )
    paths = write_report(comparison, chosen.output, chosen.name or chosen.profile)
    print(paths[1].read_text(encoding="utf-8"))
    print("written:", ", ".join(map(str, paths)))
    return 0 if all(check.passed for check in comparison.checks) else 1


def run_child(order: Order) -> PeerRun:
    """One engine, in a process of its own."""
    subprocess.run([sys.executable, "-m", "benchmarks.child", json.dumps(asdict(order))], cwd=ROOT, check=True)
    plain = json.loads(Path(order.output).read_text(encoding="utf-8"))
    plain["figures"] = [Figures(**figures) for figures in plain["figures"]]
    plain["samples"] = [Sample(**sample) for sample in plain["samples"]]
    return PeerRun(**plain)


def environment() -> dict[str, str]:
    """What of this machine and of the installed versions a reader needs to judge the figures."""
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy")]
    return {
        "processor": f"{processor}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(versions),
        "commit": _commit(),
    }


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--profile", choices=PROFILES, default="cpu")
    parser.add_argument("--workload", action="append", help="one of the profile's; may be given several times")
    parser.add_argument(
        "--engines",
        default=",".join(PEERS),
        help="in this order; the last is what the others are divided by (default: those installed)",
    )
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--name", help="of the files (default: the profile)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
