"""From what a caller asked for to what the scheduler needs: tokenised, validated, every default resolved.

What may take long runs on worker threads, see `Preparation.is_quick`. Nothing here knows of other requests: what
depends on them (a duplicate id, the size of the pool) is checked on the engine's thread.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from asyncllm.config import EngineConfig
from asyncllm.engine.grammars import Grammars
from asyncllm.engine.guide import Guide
from asyncllm.engine.guide_maker import GuideMaker
from asyncllm.engine.hook_driver import Hooks
from asyncllm.engine.logprob_reader import LogprobReader
from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import Int32Array, RowSampling
from asyncllm.engine.row_sampling import SamplingResolver
from asyncllm.engine.scheduling.request import RequestSpec
from asyncllm.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    GrammarError,
    InvalidPromptError,
)
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.outputs.detokenizer import TextStream
from asyncllm.outputs.repetition_detector import RepetitionDetector
from asyncllm.outputs.stop_matcher import StopMatcher
from asyncllm.params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int] | NDArray[np.integer[Any]]
"""A text, chat messages, or token ids."""

QUICK_IDS = 512
"""Ids of a prompt that take some 30 µs, so that a turn's worth of such requests takes less than a step."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How chat messages become a text; without a meaning for other prompts."""

    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    template: str | None = None  # Jinja source, in place of the model's own


@dataclass(slots=True)
class Submission:
    """One request as its caller stated it. To be read only, like all that is made for each request: a frozen dataclass
    takes three times as long to make."""

    prompt: Prompt
    params: SamplingParams
    arrival: float  # of `stream()`, time.monotonic()
    chat: ChatOptions
    priority: int = 0
    deadline: float | None = None  # absolute
    cache_salt: str | None = None

    @property
    def characters(self) -> int:
        """About how much text there is to work on: the prompt, and a grammar."""
        structured = self.params.structured_output
        return count_characters(self.prompt) + (0 if structured is None else structured.characters)


@dataclass(frozen=True, slots=True)
class TextWork:
    """What a preparation does beside any request, as data: one of its methods, and what it is given."""

    name: Literal["tokenize", "detokenize", "render", "prompts"]
    arguments: tuple[Any, ...]
    characters: int  # about how much text there is to work on


@dataclass(slots=True)
class PreparedChoice:
    """What each choice of a request has of its own. To be read only."""

    sampling: RowSampling
    detokenizer: TextStream | None
    matcher: StopMatcher | None
    guide: Guide | None  # of a late request
    hooks: Hooks | None
    detector: RepetitionDetector | None


@dataclass(slots=True)
class Prepared:
    """One request, ready to be scheduled. To be read only."""

    token_ids: Int32Array
    choices: tuple[PreparedChoice, ...]
    max_tokens: int | None  # None: to the end of the context
    min_tokens: int
    stop_token_ids: frozenset[int]  # all that end the request
    logprobs: LogprobReader

    def spec(self, choice: int, ids: Sequence[int], submission: Submission, max_model_len: int) -> RequestSpec:
        """What the scheduler is told of a choice; `ids`: those of all choices. `max_tokens` of 0 is scheduled for the
        prompt's sake alone, and samples a token that nobody gets."""
        return RequestSpec(
            request=ids[choice],
            fork_of=ids[0] if choice else None,
            token_ids=self.token_ids,
            sampling=self.choices[choice].sampling,
            max_tokens=max_model_len if self.max_tokens is None else max(self.max_tokens, 1),
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            arrival=submission.arrival,
            priority=submission.priority,
            deadline=submission.deadline,
            cache_salt=submission.cache_salt,
        )


class Preparation:
    """Prepares requests for one model. Holds no state of a request; any number of threads may use it at once."""

    def __init__(self, model: ServedModel, config: EngineConfig, capacity: int) -> None:
        """`capacity`: the most tokens that one request can come to, see `SchedulerConfig.capacity`.

        Raises `ConfigError` where `config` asks for grammars that the model's tokenizer cannot have.
        """
        self._model = model
        self._resolver = SamplingResolver(model)
        grammars = Grammars(model.tokenizer, model.eos_token_ids, model.facts.vocab_size)
        self._logprobs = LogprobReader(_no_bytes if model.tokenizer is None else model.tokenizer.token_bytes)
        self._guides = GuideMaker(model, model.constrain or grammars.constraint)
        self._limit = capacity  # tokens: no prompt of as many is worth encoding
        if config.prepare_grammars:
            try:
                grammars.build()
            except GrammarError as error:
                raise ConfigError(f"prepare_grammars: {error}") from None

    def is_quick(self, submission: Submission) -> bool:
        """Whether `prepare` takes less time than it takes to wake a worker: few ids, nothing to look up in a
        vocabulary, and nothing of the host's own that would be called."""
        prompt, params = submission.prompt, submission.params
        if type(prompt) not in (list, tuple) or not 0 < len(prompt) <= QUICK_IDS or {*map(type, prompt)} != {int}:
            return False
        if self._model.constrain is not None or params.n > 1 or params.stop or params.bad_words:
            return False
        return params.is_plain

    def prepare(self, submission: Submission) -> Prepared:
        """Raises the `RequestError` that fits; anything else that it raises is a fault of a tokenizer or template."""
        params = submission.params
        resolved = self._resolver.resolve(params)
        token_ids = self._prompt_array(submission.prompt, submission.chat, params.truncate_prompt_tokens)
        sampling = resolved.sampling_for(params, len(token_ids))
        guides: Sequence[Guide | None] = (None,) * params.n
        if resolved.guided:
            guides = self._guides.make(params, resolved.bad_words, token_ids.tolist(), sampling)
        return Prepared(
            token_ids=token_ids,
            choices=tuple([self._choice(params, i, sampling, token_ids, guide) for i, guide in enumerate(guides)]),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=resolved.stop_ids,
            logprobs=self._logprobs,
        )

    def _choice(
        self, params: SamplingParams, choice: int, sampling: RowSampling, token_ids: Int32Array, guide: Guide | None
    ) -> PreparedChoice:
        tokenizer, stops = self._model.tokenizer, tuple(params.stop)
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            detokenizer = tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_ids=token_ids.tolist(),
            )
        if choice or guide is not None:
            told = None if choice else sampling.prompt_logprobs  # the prompt is that of the first choice
            reads = bool(params.logits_processors)
            late = guide is not None
            sampling = replace(sampling, choice=choice, late=late, reads_logits=reads, prompt_logprobs=told)
        loops, detector = params.repetition_detection, None
        if loops is not None:
            detector = RepetitionDetector(loops.min_pattern_size, loops.max_pattern_size, loops.min_count)
        return PreparedChoice(
            sampling=sampling,
            detokenizer=detokenizer,
            matcher=StopMatcher(stops, include=params.include_stop_str_in_output) if stops else None,
            guide=guide,
            hooks=Hooks(params.logits_processors, params.on_token) if params.has_hooks else None,
            detector=detector,
        )

    def carry_out(self, work: TextWork) -> Any:
        """Do what is asked for beside any request."""
        return getattr(self, work.name)(*work.arguments)

    def tokenize(self, prompt: str | Messages, chat: ChatOptions, limit: int | None = None) -> list[int]:
        """The ids of a text, by the tokenizer's own rule for special tokens, or of messages, by the template's."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise InvalidPromptError("this model has no tokenizer; give token ids")
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=True, limit=limit)
        return tokenizer.encode(self.render(prompt, chat), add_special_tokens=False, limit=limit)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of these ids."""
        if self._model.tokenizer is None:
            raise InvalidPromptError("this model has no tokenizer")
        ids = self._id_array(token_ids, may_be_empty=True).tolist()
        return self._model.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: Messages, chat: ChatOptions) -> str:
        """The text of chat messages."""
        template = self._model.chat_template
        if chat.template is not None:
            tokenizer = self._model.tokenizer
            template = ChatTemplate(chat.template, {} if tokenizer is None else tokenizer.special_tokens)
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template: give text or token ids, or a template as EngineConfig.chat_template"
            )
        variables = {"add_generation_prompt": True, **chat.template_kwargs}
        return template.render(
            messages, **{**variables, "tools": chat.tools, "continue_final_message": chat.continue_final_message}
        )

    def prompts(self, texts: Sequence[str | Sequence[int]]) -> list[Int32Array]:
        """The ids of texts that are no requests, checked as theirs are."""
        return [self._prompt_array(text, ChatOptions(), None) for text in texts]

    def _prompt_array(self, prompt: Prompt, chat: ChatOptions, last: int | None) -> Int32Array:
        """The prompt's ids, or so many `last` ones of them; given ids before those are not looked at."""
        limit = self._limit if last is None else None
        kept = slice(None if last is None else -last, None)
        if isinstance(prompt, str) or is_messages(prompt):
            array = np.array(self.tokenize(prompt, chat, limit=limit)[kept], dtype=np.int32)
            if len(array) == 0:
                raise InvalidPromptError("the prompt is empty" if not prompt else "the prompt has no token")
            return self._within_vocabulary(array)
        if last is not None:  # first, and unseen: converting millions of ids holds the interpreter lock
            try:
                prompt = prompt[kept]
            except (TypeError, LookupError):
                raise _not_ids(prompt) from None
        return self._id_array(prompt, limit=self._limit)

    def _id_array(self, ids: Any, limit: int | None = None, *, may_be_empty: bool = False) -> Int32Array:
        """[n] int32, all within the vocabulary."""
        try:
            count = len(ids)
        except TypeError:
            raise _not_ids(ids) from None
        if limit is not None and count > limit:  # first: converting millions of ids holds the interpreter lock
            raise ContextLengthError(f"the prompt has {count:,} tokens; the context, or the KV pool, holds {limit:,}")
        if count == 0:
            if may_be_empty:
                return np.empty(0, dtype=np.int32)
            raise InvalidPromptError("the prompt is empty")
        if isinstance(ids, bytes | bytearray | memoryview):
            raise _not_ids(ids)
        if isinstance(ids, list | tuple) and (isinstance(ids[0], bool) or not isinstance(ids[0], int | np.integer)):
            raise _not_ids(ids)  # without converting it: that may take long, and holds the interpreter lock
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError, OverflowError):
            array = np.empty(0, dtype=object)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise _not_ids(ids)
        return self._within_vocabulary(array)

    def _within_vocabulary(self, array: NDArray[np.integer[Any]]) -> Int32Array:
        vocab_size = self._model.facts.vocab_size
        if array.dtype == np.int64 and np.maximum.reduce(array.view(np.uint64)) < vocab_size:
            return array.astype(np.int32)  # in one look: a negative id is a very large one here
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidPromptError(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})")
        return array.astype(np.int32)


def _no_bytes(token_id: int) -> bytes:
    return b""


def _not_ids(prompt: object) -> InvalidPromptError:
    return InvalidPromptError(f"a prompt is a text, chat messages or token ids, got {reprlib.repr(prompt)}")


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Whether a prompt is a list of chat messages: its first item is a mapping."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def count_characters(prompt: object) -> int:
    """About how much text there is to tokenise."""
    if isinstance(prompt, str):
        return len(prompt)
    if not is_messages(prompt):
        return 0
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))
