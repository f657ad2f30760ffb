"""The README's table about structured output, from `results/structured.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARKS = ("<!-- structured: begin -->\n", "<!-- structured: end -->")


def structured_table(found: Mapping[str, Any]) -> str:
    """The section between the marks."""
    suite, small, large = found["suite"], found["applications"], found["applications_large"]
    builds = found["build_seconds"]
    sizes = [f"{int(size):,}" for size in builds]
    lines = [
        "| | compiled | compile p50 / p99 | mask p50 / p99 | random outputs that ended | of them valid |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = {
        "JSON Schema Test Suite": suite,
        f"200 schemas of applications, {sizes[0]} tokens": small,
        f"the same, {sizes[1]} tokens": large,
    }
    for name, part in rows.items():
        milliseconds = part["ms"]
        compiled = f"{part['compiled']} of {part['schemas']}"
        times = [
            f"{milliseconds[what]['p50']:.3g} / {milliseconds[what]['p99']:.3g} ms" for what in ("compile", "mask")
        ]
        lines.append(f"| {name} | {compiled} | {' | '.join(times)} | {part['ended']} | {_share(part)} |")
    batch = found["throughput"]
    lines += [
        "",
        f"Of the suite's {suite['instances']:,} instances, {len(suite['too_loose'])} that are not valid were possible. "
        "Over a "
        f"device that takes {batch['step_ms']:g} ms a step, 64 rows of which half have a schema make "
        f"{_change(batch['loss'])} tokens a second than 64 without, and a row without one goes "
        f"{_change(batch['loss_of_a_free_row'], ('slower', 'faster'))} "
        f"({batch['processor_us_per_token']['half']:g} µs of processor time a token, in place of "
        f"{batch['processor_us_per_token']['none']:g}); {batch['cores']} cores with a load average of "
        f"{batch['load']:g}.",
    ]
    model = found.get("model")
    if model:
        lines[-1] += (
            f" SmolLM2-135M filled in {model['outputs']} of the schemas: {model['ended']} ended by themselves, "
            f"{_share(model)} of these are valid."
        )
    lines[-1] += f" llguidance {found['llguidance']}; `python -m benchmarks.structured --model`."
    return "\n".join(lines)


def _share(part: Mapping[str, Any]) -> str:
    return f"{100 * part['valid'] / part['ended']:.4g} %" if part["ended"] else "none"


def _change(loss: float, words: tuple[str, str] = ("fewer", "more")) -> str:
    return f"{abs(100 * loss):.1f} % {words[0] if loss >= 0 else words[1]}"


def write_section(readme: Path, found: Mapping[str, Any]) -> None:
    """Put the table between the marks."""
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    readme.write_text(f"{before}{MARKS[0]}{structured_table(found)}\n{MARKS[1]}{after}", encoding="utf-8")
