from __future__ import annotations

import asyncio
import inspect
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from asyncllm import Choice, Completion, Embedding, SamplingParams, StructuredOutput, TokenDelta, Usage, errors
from asyncllm.config import EngineConfig
from asyncllm.engine.isolation.remote_hooks import without_functions
from asyncllm.engine.isolation.travel import ErrorReport, ForeignError, pack, pack_plain, unpack
from asyncllm.engine.plan import CacheGroup, TokenScores
from asyncllm.engine.preparation import ChatOptions, Submission
from asyncllm.errors import AsyncLLMError, HookFailed, ModelLoadError
from asyncllm.metrics import EngineStatistics, Inspection, RequestMetrics
from asyncllm.params import RepetitionDetection
from asyncllm.results import FinishReason, PositionLogprobs, TokenLogprob
from asyncllm.testing.shadow_engine import ShadowModel
from tests.engine.isolation.models import never_loads

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AsyncLLMError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_crosses(kind: type[AsyncLLMError]) -> None:
    error = kind("what is wrong: 5 %")
    error.__cause__ = ZeroDivisionError("by zero")
    plain = pickle.loads(pickle.dumps(error))
    assert (type(plain), str(plain)) == (kind, "what is wrong: 5 %")
    restored = pickle.loads(pickle.dumps(ErrorReport.of(error))).restore()
    assert (type(restored), str(restored)) == (kind, "what is wrong: 5 %")
    assert (type(restored.__cause__), str(restored.__cause__)) == (ZeroDivisionError, "by zero")


class Named(HookFailed):
    """A user's own."""


class Awkward(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)

    def __repr__(self) -> str:
        return "<awkward>"


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_other_errors_cross_as_well_as_they_can() -> None:
    ours = ErrorReport.of(Named("too long")).restore()
    assert (type(ours), str(ours)) == (HookFailed, "too long")
    assert repr(ErrorReport.of(KeyError("x")).restore()) == "KeyError('x')"
    awkward = ErrorReport.of(Awkward("a", "b")).restore()
    assert (type(awkward), str(awkward), repr(awkward)) == (ForeignError, "ab", "<awkward>")
    assert repr(pickle.loads(pickle.dumps(awkward))) == "<awkward>"
    local = type("Local", (Exception,), {})("unknown elsewhere")
    assert repr(ErrorReport.of(local).restore()) == "Local('unknown elsewhere')"
    assert "Unshowable" in str(ErrorReport.of(Unshowable()).restore())


def test_where_an_error_was_raised_is_noted() -> None:
    def deep_inside() -> None:
        raise OSError("broken pipe")

    with pytest.raises(OSError, match="broken pipe") as caught:
        deep_inside()
    failure = ModelLoadError("cannot be loaded")
    failure.__cause__ = caught.value
    restored = pickle.loads(pickle.dumps(ErrorReport.of(failure))).restore()
    assert "deep_inside" in "".join(restored.__cause__.__notes__)


def test_a_long_chain_of_causes_is_cut() -> None:
    error = ValueError("0")
    for n in range(1, 50):
        error = _caused(ValueError(str(n)), error)
    restored: BaseException | None = ErrorReport.of(error).restore()
    texts = []
    while restored is not None:
        texts.append(str(restored))
        restored = restored.__cause__
    assert texts == ["49", "48", "47", "46", "45", "44"]


def _caused(error: ValueError, cause: ValueError) -> ValueError:
    error.__cause__ = cause
    return error


VALUES: list[Any] = [
    EngineConfig(isolation="process", num_blocks=7),
    SamplingParams(logit_bias={3: 1.0}, stop=["a"], repetition_detection=RepetitionDetection(max_pattern_size=4)),
    SamplingParams(structured_output=StructuredOutput(choice=["yes", "no"])),
    RequestMetrics(1.0, 2.0),
    EngineStatistics(memory_bytes={"cache": 5}),
    Inspection(b"\x00\x01", ()),
    Usage(1, 2),
    Embedding([1.0], 3),
    CacheGroup(window=5),
    TokenDelta("a", (1,), finish_reason=FinishReason.STOP, usage=Usage(1, 1)),
    PositionLogprobs(TokenLogprob(1, -0.5, 1, b"a", "a"), ()),
    Completion("r", (Choice(0, "a", (1,), FinishReason.LENGTH),), Usage(1, 1), (5,), RequestMetrics(0.0)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_crosses(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_scores_of_one_position_cross_alone() -> None:
    many = np.arange(100_000, dtype=np.int32)
    scores = TokenScores(many, many, many.astype(np.float32), many).at(7)
    data = pickle.dumps(scores)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert (again.token_ids.tolist(), again.logprobs.tolist(), len(again)) == ([7], [7.0], 1)


class Title(str):
    __slots__ = ("_lock",)


def test_the_hosts_own_mappings_and_texts_cross_as_plain_ones() -> None:
    message = MappingProxyType({"role": Title("user"), "content": Title("Hi")})
    submission = Submission([message], SamplingParams(), 0.0, ChatOptions())
    prompt = unpack(pack_plain(submission)).prompt
    assert prompt == [{"role": "user", "content": "Hi"}]
    assert type(prompt[0]) is dict
    assert {type(text) for text in prompt[0].values()} == {str}


def test_what_only_the_host_has_stays_there() -> None:
    def processor(*_: Any) -> None: ...

    class Local:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "object", "properties": {}}

    params = SamplingParams(
        logits_processors=[processor, len], on_token=print, structured_output=StructuredOutput.from_model(Local)
    )
    crossed = pickle.loads(pickle.dumps(without_functions(params)))
    assert crossed.has_hooks
    assert [repr(hook) for hook in crossed.logits_processors] == [f"{processor!r:.80}", repr(len)]
    assert repr(crossed.on_token) == repr(print)
    assert crossed.structured_output == params.structured_output
    assert crossed.structured_output.model is None
    assert params.structured_output is not None
    assert params.structured_output.model is Local  # the caller's own is as it was
    assert params.logits_processors == (processor, len)
    plain = SamplingParams(n=2)
    assert without_functions(plain) is plain


def test_loaders_that_cross(tmp_path: Path) -> None:
    assert unpack(pack(never_loads)) is never_loads
    shadow = ShadowModel(vocab_size=77, latency=0.5)
    asyncio.run(_bring_up(shadow))
    again = unpack(pack(shadow))
    assert (again.vocab_size, again.runner) == (77, None)


async def _bring_up(shadow: ShadowModel) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as workers:
        model = await shadow(EngineConfig(), workers)
        await model.runner.aclose()


@pytest.mark.parametrize("kind", ["class", "function", "instance"])
def test_what_is_defined_in_the_script_is_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader: ...

    def load() -> None: ...

    for thing in (Loader, load):
        thing.__module__, thing.__qualname__ = "__main__", thing.__name__
    main = __import__("__main__")
    monkeypatch.setattr(main, "Loader", Loader, raising=False)
    monkeypatch.setattr(main, "load", load, raising=False)
    thing = {"class": Loader, "function": load, "instance": Loader()}[kind]
    assert pickle.dumps(thing)  # pickle itself would take it
    with pytest.raises(pickle.PicklingError, match=r"defined in the script that was started \(__main__\)"):
        pack(thing)
