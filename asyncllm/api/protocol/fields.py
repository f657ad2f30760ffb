"""What the bodies of several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncllm.params import MAX_LOGPROB_IDS

MAX_SEED, MIN_SEED = 2**64 - 1, -(2**63)
INT32 = 2**31 - 1


class Body(BaseModel):
    """A request, or a part of one. Types are strict (no "1" for 1); fields that are not known are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class Open(Body):
    """A part of a request whose unknown fields are kept: a chat template may know them."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = Field(default=None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="Send the usage with every chunk.")


Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=0, le=INT32)]


class RepetitionFields(Body):
    """`RepetitionDetection`."""

    max_pattern_size: Count
    min_pattern_size: Count = 1
    min_count: Count = 3


class SamplingFields(Body):
    """What is sampled and when it ends: the parameters that are named alike in all of the APIs and in
    `SamplingParams`."""

    temperature: Annotated[float, Field(ge=0, le=3e38)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = Field(default=None, description="0 or -1 keeps all.")
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=0, le=1e6)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=1e6)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=1e6)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = Field(default=None, description="Token ids, as text, to what is added.")
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: Annotated[list[str], Field(max_length=256)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_IDS)] | None = Field(
        default=None, description="Tokens whose log-probabilities are told beside the likeliest; needs logprobs."
    )
    repetition_detection: RepetitionFields | None = Field(
        default=None, description="Ends an answer that repeats itself."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    thinking_token_budget: Count | None = None


class RequestFields(Body):
    """What every generating endpoint takes beside its own fields."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="Cached prefixes are shared only with requests of the same salt."
    )
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] | None = Field(default=None, description="Lower goes first.")
    deadline_ms: Annotated[float, Field(gt=0, le=1e12)] | None = Field(
        default=None, description="The answer ends after so many milliseconds, with what there is of it."
    )
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None


class StructuredFields(Body):
    """vLLM's `structured_outputs`: exactly one of them."""

    json_schema: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class JsonSchemaFormat(Body):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What a chat answer must look like."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    structural_tag: dict[str, Any] | None = None
    pattern: str | None = None
    grammar: str | None = None


class ToolFunction(Open):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Open):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: ToolFunction


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """An error, as OpenAI's clients read it."""

    error: ErrorDetail
