"""Writes `benchmarks/PROFILE.md` from what `benchmarks.gpu --profile` measured.

    python -m benchmarks.profile_report [FILE ...]

Without files, from all of `benchmarks/results/` that hold a profile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lock_releases import PARTS
from benchmarks.step_profile import BANDWIDTH, OPERATIONS, RoleTime

ROOT = Path(__file__).parent


def cells(*values: object) -> str:
    return f"| {' | '.join(str(value) for value in values)} |"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The first column is text, the others are numbers."""
    header = list(header)
    return [cells(*header), cells("---", *["---:"] * (len(header) - 1)), *(cells(*row) for row in rows), ""]


def role_row(role: dict[str, Any], whole: float) -> list[object]:
    """One kind of work; its limit is the larger of the times that bytes and operations take."""
    time = RoleTime(**role)
    moved = "" if time.bytes is None else f"{time.bytes / 1e6:,.1f}"
    operations = f"{time.operations / 1e9:,.1f}" if time.operations else ""
    limit = "" if time.limit is None else f"{time.limit:,.0f}"
    share = "" if time.limit is None else f"{time.limit / time.microseconds:.0%}"
    kernels = ", ".join(f"`{short(name)}`" for name in time.kernels[:2])
    return [
        f"{time.role} ({kernels})",
        f"{time.launches:.0f}",
        f"{time.microseconds:,.0f}",
        f"{time.microseconds / whole:.0%}",
        moved,
        operations,
        limit,
        share,
    ]


def short(name: str) -> str:
    """A kernel's name without what follows its own."""
    return name.partition("<")[0].removeprefix("void ").partition("(")[0][:48]


def profile_part(name: str, profile: dict[str, Any]) -> list[str]:
    """Heading, sentence and table of one kind of step."""
    whole = profile["busy"] + profile["gaps"] + profile["between"]
    period = profile["period"]
    undisturbed = "" if period is None else f"; undisturbed, a step takes {period:,.0f} µs"
    # of prompts, each step is a request by itself
    between = "until the next one is asked for and begins" if profile["load"]["causal"] else "between steps"
    return [
        f"### {name}",
        "",
        f"{profile['steps']} steps of {profile['load']['tokens']:,.0f} tokens over {profile['load']['context']:,.0f} "
        f"positions: kernels {profile['busy']:,.0f} µs, gaps between them {profile['gaps']:,.0f} µs, {between} "
        f"{profile['between']:,.0f} µs{undisturbed}.",
        "",
        *table(
            ("work (kernels)", "launches", "µs", "share", "MB", "GFLOP", "limit µs", "of the limit"),
            [role_row(role, whole) for role in profile["roles"] if role["microseconds"] >= 0.5],
        ),
    ]


def host_part(passes: list[dict[str, Any]]) -> list[str]:
    """What the engine's thread does in a step, by workload; the last pass of each."""
    last = {each["figures"]["workload"]: each for each in passes}
    if not last:
        return []
    return [
        "### Engine's thread, µs a step",
        "",
        *table(
            ("workload", "steps", *PARTS),
            [[name, each["steps"], *(f"{each['thread'][part]:,.0f}" for part in PARTS)] for name, each in last.items()],
        ),
    ]


def power_part(passes: list[dict[str, Any]]) -> list[str]:
    """The GPU's clock and power by workload; the last pass of each."""
    found = {each["figures"]["workload"]: each.get("power") for each in passes}
    rows = [[name, f"{power['clock']:,.0f}", f"{power['watts']:,.0f}"] for name, power in found.items() if power]
    if not rows:
        return []
    return ["### Clock and power", "", *table(("workload", "MHz", "W"), rows)]


def lock_part(releases: dict[str, float]) -> list[str]:
    """How often that thread gives the interpreter lock up."""
    if not releases:
        return []
    return [
        "### Interpreter lock given up by the engine's thread, times a decode step of 128 rows",
        "",
        *table(
            ("", *PARTS, "all"),
            [
                [
                    "measured beside a spinning thread",
                    *(f"{releases[part]:.1f}" for part in PARTS),
                    f"{sum(releases.values()):.1f}",
                ]
            ],
        ),
    ]


def report(results: Iterable[Path]) -> str:
    """The page."""
    lines = [
        "# Where a step's time goes",
        "",
        "Made by `python -m benchmarks.profile_report` of what `python -m benchmarks.gpu MODEL --profile` measured. A",
        "kernel's time is what it adds to the step: kernels overlap (programmatic dependent launch), so it counts from",
        "the end of all that began before it. The limit is the larger of two times, those of the bytes that must move,",
        f"each once, at {BANDWIDTH / 1e12:.2f} TB/s, and of the operations at {OPERATIONS / 1e12:.0f} TFLOP/s, both as",
        "measured on an H200; a weight that is read to the end passes the former by some percent. Under load the GPU",
        "lowers its clock, 1,980 MHz at most, to stay within its power of 700 W (see the tables of clock and power): a",
        "long series of matrix products then reaches some 700 TFLOP/s, and caches and kernels are slower too.",
        "",
    ]
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not found.get("profiles"):
            continue
        lines += [f"## {found['model']}", "", f"`{found['command']}`, {found['device']}.", ""]
        for name, profile in found["profiles"].items():
            lines += profile_part(name, profile)
        lines += host_part(found["passes"])
        lines += power_part(found["passes"])
        lines += lock_part(found.get("lock_releases", {}))
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    files = [Path(each) for each in sys.argv[1:]] or [
        each for kind in ("gpu", "profile") for each in sorted((ROOT / "results").glob(f"{kind}-*.json"))
    ]
    text = report(files)
    (ROOT / "PROFILE.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
