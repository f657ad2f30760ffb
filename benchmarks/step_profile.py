"""Where a step's time goes on a GPU: its kernels, told apart by what they do in the model, beside the least they need.

With programmatic dependent launch a kernel begins before its predecessor has ended. So the time of a kernel is what
passes from the end of all that began before it, or from its own begin where that is later, to its own end; the times
and the gaps of a step add up to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncllm.models.configuration import ModelConfig

BANDWIDTH = 4.45e12  # bytes a second that an H200 reads, measured
OPERATIONS = 788e12  # of bfloat16 a second in a matrix product on random numbers, measured
_FIRST = "_step_layout_kernel"
_LAST = "_token_output_kernel"
_PRODUCTS = (
    "_vector_kernel",
    "_tile_kernel",
    "_specialized_tile_kernel",
    "_gated_product_kernel",
    "nvjet",
    "cutlass",
    "gemm",
    "gemv",
    "sm90_",
    "sm80_",
)
_ROLES = {
    "_rms_norm_kernel": "norms",
    "_rope_cache_kernel": "rope, cache write",
    "_gated_kernel": "activation",
    "_step_layout_kernel": "step layout",
    "_plan_kernel": "attention plan",
    "_prefix_kernel": "attention plan",
    "_token_output_kernel": "sampling",
    "_row_join_kernel": "row joins",
    "Memset": "counters",
    "fill": "counters",
    "_sum_tiles_kernel": "sampling",
    "_draw_kernel": "sampling",
    "_draw_wide_kernel": "sampling",
}
_LAYER = ("attention output", "gate and up", "down", "qkv")  # the order of a layer's products, from its attention on


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel that ran; microseconds since some moment."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTime:
    """What one kind of work takes of a step."""

    role: str
    kernels: list[str]
    launches: float
    microseconds: float
    bytes: float | None = None  # that it must move at least
    operations: float | None = None

    @property
    def limit(self) -> float | None:
        """Microseconds that the hardware allows; None where that makes no sense."""
        if self.bytes is None:
            return None
        return 1e6 * max(self.bytes / BANDWIDTH, (self.operations or 0.0) / OPERATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What the steps compute."""

    tokens: float  # a step
    context: float  # positions that its rows attend to, all together
    causal: bool  # its tokens are whole prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The mean of some steps of one kind. Times are microseconds."""

    load: StepLoad
    steps: int
    period: float | None  # of a step while nobody looks
    busy: float
    gaps: float  # between kernels of a step
    longest_gaps: dict[str, float]  # the same, of those before some kinds of kernels: "after, before"
    between: float  # from the end of a step to the begin of the next
    roles: list[RoleTime]


def profile_steps(
    events: Iterable[DeviceEvent], config: ModelConfig, load: StepLoad, period: float | None = None
) -> StepProfile:
    """Of the whole steps among the events; `period` is known from before."""
    ordered = sorted(events, key=lambda event: event.start)
    starts = [i for i, event in enumerate(ordered) if event.name == _FIRST]
    if len(starts) < 2:
        raise ValueError(f"{len(starts)} steps began while the profiler looked; at least 2 are needed")
    times: dict[str, float] = defaultdict(float)
    names: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    gaps = between = 0.0
    before, ended = "", False
    places: dict[str, float] = defaultdict(float)
    reached = ordered[starts[0]].start
    for first, last in pairwise(starts):
        step = ordered[first:last]
        for event, role in zip(step, roles_of([event.name for event in step]), strict=True):
            gap = max(0.0, event.start - reached)
            if ended:  # what is launched for the next step comes before its layout
                between += gap
            elif event.name != _FIRST:
                gaps += gap
                places[f"{before}, {role}"] += gap
            times[role] += max(0.0, event.end - max(event.start, reached))
            names[role][event.name] += 1
            reached, before = max(reached, event.end), role
            ended = ended or event.name == _LAST
        between += max(0.0, ordered[last].start - reached)
        reached, ended = max(reached, ordered[last].start), False
    steps = len(starts) - 1
    work = least_work(config, load)
    roles = [
        RoleTime(
            role=role,
            kernels=sorted(names[role], key=lambda name: -names[role][name]),
            launches=sum(names[role].values()) / steps,
            microseconds=time / steps,
            bytes=work.get(role, (None, None))[0],
            operations=work.get(role, (None, None))[1],
        )
        for role, time in sorted(times.items(), key=lambda item: -item[1])
    ]
    return StepProfile(
        load=load,
        steps=steps,
        period=period,
        busy=sum(times.values()) / steps,
        gaps=gaps / steps,
        longest_gaps={place: gap / steps for place, gap in sorted(places.items(), key=lambda item: -item[1])[:6]},
        between=between / steps,
        roles=roles,
    )


def roles_of(names: Sequence[str]) -> list[str]:
    """What each of a step's kernels does, from what comes before it."""
    roles: list[str] = []
    product = len(_LAYER) - 2  # of the layer whose attention was last; before the first layer, as if one had ended
    for name in names:
        known = next((role for start, role in _ROLES.items() if name.startswith(start)), None)
        if known is not None:
            role = known
        elif "attention" in name or "merge" in name:
            role, product = "attention", -1
        elif "splitKreduce" in name:
            role = _LAYER[max(0, product) % len(_LAYER)]
        elif any(part in name for part in _PRODUCTS):
            product += 1
            role = _LAYER[product % len(_LAYER)]
        else:
            role = "other"
        roles.append(role)
    # the last "qkv" follows the last layer
    for i in reversed(range(len(roles))):
        if roles[i] == "qkv":
            roles[i] = "head"
            break
    return roles


def least_work(config: ModelConfig, load: StepLoad) -> dict[str, tuple[float, float]]:
    """Bytes and operations of a step by role: each weight and each position of the cache read once, in 16 bits."""
    tokens, context = load.tokens, load.context
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def product(outputs: int, inputs: int, rows: float, times: int, *, given: int = 0) -> tuple[float, float]:
        moved = 2.0 * (outputs * inputs + rows * (inputs + (given or outputs)))
        return times * moved, times * 2.0 * rows * outputs * inputs

    sampled = 1.0 if load.causal else tokens
    seen = context / 2 if load.causal else context / max(tokens, 1.0)  # of a token, on average
    return {
        "qkv": product(queries + 2 * keys, hidden, tokens, layers),
        "attention output": product(hidden, queries, tokens, layers),
        "gate and up": product(2 * inner, hidden, tokens, layers, given=inner),
        "down": product(hidden, inner, tokens, layers),
        "head": product(config.vocab_size, hidden, sampled, 1),
        "attention": (
            layers * 2.0 * (2 * keys * context + 2 * queries * tokens),
            layers * 4.0 * queries * seen * tokens,
        ),
        "rope, cache write": (layers * 4.0 * tokens * (queries + 2 * keys), 0.0),
        "norms": (2 * layers * 4.0 * tokens * hidden, 0.0),
        "activation": (layers * 6.0 * tokens * inner, 0.0),
    }
