from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import read_model_config
from benchmarks.step_profile import DeviceEvent, StepLoad, least_work, profile_steps, roles_of

ROOT = Path(__file__).parents[2]
LOAD = StepLoad(tokens=2, context=600, causal=False)
FUSED = "_vector_kernel"
LIBRARY = "nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return read_model_config(json.loads((ROOT / "benchmarks/models/llama-3.1-8b/config.json").read_text()))


def test_roles_of_a_step_by_our_kernels() -> None:
    layer = [FUSED, "_rope_cache_kernel", "_attention_kernel", FUSED, FUSED, FUSED]
    names = ["_step_layout_kernel", "_plan_kernel", "_embedding_kernel", *layer, *layer, FUSED, "_draw_kernel"]
    of_layer = ["qkv", "rope, cache write", "attention", "attention output", "gate and up", "down"]
    assert roles_of(names) == ["step layout", "attention plan", "other", *of_layer, *of_layer, "head", "sampling"]


def test_roles_of_a_step_by_the_library() -> None:
    layer = [
        "_rms_norm_kernel",
        LIBRARY,
        "_rope_cache_kernel",
        "_attention_kernel",
        "_specialized_attention_kernel",
        LIBRARY,
        "_rms_norm_kernel",
        LIBRARY,
        "_gated_kernel",
        LIBRARY,
        "void cublasLt::splitKreduce_kernel<32>",
    ]
    of_layer = ["norms", "qkv", "rope, cache write", "attention", "attention", "attention output", "norms"]
    of_layer += ["gate and up", "activation", "down", "down"]
    assert roles_of([*layer, *layer, "_rms_norm_kernel", LIBRARY]) == [*of_layer, *of_layer, "norms", "head"]


def test_roles_of_a_step_of_many_rows() -> None:
    """One of its products is ours, with the activation in it."""
    layer = ["_rms_norm_kernel", LIBRARY, "_attention_kernel", LIBRARY, "_rms_norm_kernel", "_gated_product_kernel"]
    of_layer = ["norms", "qkv", "attention", "attention output", "norms", "gate and up", "down"]
    assert roles_of([*layer, LIBRARY, *layer, LIBRARY, LIBRARY]) == [*of_layer, *of_layer, "head"]


def test_times_and_gaps_add_up(config: ModelConfig) -> None:
    events = []
    for start in (100.0, 200.0, 300.0):
        events += [
            DeviceEvent("_step_layout_kernel", start, start + 10),
            DeviceEvent(FUSED, start + 8, start + 30),  # began while the one before ran
            DeviceEvent("_token_output_kernel", start + 34, start + 40),
            DeviceEvent("_row_join_kernel", start + 70, start + 75),  # for the next step
        ]
    profile = profile_steps(reversed(events), config, LOAD, period=99.0)
    assert profile.steps == 2
    assert (profile.busy, profile.gaps, profile.between) == (41.0, 4.0, 55.0)
    assert profile.longest_gaps == {"head, sampling": 4.0, "step layout, head": 0.0}
    assert {role.role: role.microseconds for role in profile.roles} == {
        "step layout": 10,
        "head": 20,
        "sampling": 6,
        "row joins": 5,
    }
    assert [role.launches for role in profile.roles] == [1, 1, 1, 1]


def test_needs_two_steps(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="1 steps"):
        profile_steps([DeviceEvent("_step_layout_kernel", 0, 1)], config, LOAD)


def test_least_work(config: ModelConfig) -> None:
    work = least_work(config, LOAD)
    weights = sum(work[role][0] for role in ("qkv", "attention output", "gate and up", "down", "head"))
    assert weights == pytest.approx(15.01e9, rel=2e-3)  # all but the input's embedding
    cache = work["attention"][0]
    assert cache == pytest.approx(600 * 131_072, rel=0.02)
    prompt = least_work(config, StepLoad(tokens=4096, context=4096, causal=True))
    assert prompt["attention"][1] == pytest.approx(32 * 4 * 4096 * 4096 * 4096 / 2)
    assert prompt["head"][1] == 2 * 128_256 * 4096
