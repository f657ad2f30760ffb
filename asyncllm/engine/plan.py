"""What scheduling and execution share: plain data, which a test sends through bytes and back.

Nothing here decides or computes; no torch. A plan says only what changed since the plan before it. The
device keeps the rest, a *row* per running request: its last sampled token, its position, one block table per
cache group and its sampling settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncllm.outputs.token_mask import Mask

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

NULL_BLOCK = 0
"""The block that stands where nothing may be read: never allocated, never counted in `blocks_total`."""


NO_TOKEN = -1
"""In place of the token of a row none of whose logits is above -infinity, so that nothing can be sampled: bans leave
nothing, or the model has computed no numbers, which count as -infinity. The row goes on with token 0 until it ends."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same part of the history, and so share one block table per request.

    `window` is the number of last positions, the current one included, that these layers attend to
    (the `sliding_window` of a Hugging Face config); None for full attention.
    """

    window: int | None = None


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """Which log-probabilities are wanted at a position, beside that of the token which is there."""

    top: int  # of so many most likely tokens; the whole vocabulary is its size
    token_ids: tuple[int, ...] = ()  # and of these


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row is sampled, every default resolved. The order of operations is that of `SamplingParams`.

    The draw for the token at absolute position p (prompt included) depends on (seed, choice, p) alone.
    """

    temperature: float  # 0 is greedy: argmax, lowest id on ties
    top_k: int  # 0 keeps all
    top_p: float  # 1 keeps all
    min_p: float  # 0 keeps all
    seed: int  # 0 <= seed < 2**64
    choice: int = 0
    suppress_before: int = 0  # tokens at absolute positions below this may not be one of `suppressed`
    suppressed: tuple[int, ...] = ()  # the ids that would end the request before its min_tokens
    typical_p: float = 1.0  # 1 keeps all
    top_n_sigma: float = 0.0  # 0 keeps all
    xtc_probability: float = 0.0  # 0 drops nothing
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0  # for tokens of prompt and output
    frequency_penalty: float = 0.0  # these two for tokens of the output
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # by id, each once
    allowed: tuple[int, ...] | None = None  # only these ids may be sampled
    banned: tuple[int, ...] = ()  # these may not
    logprobs: LogprobsRequest | None = None  # of sampled tokens
    prompt_logprobs: LogprobsRequest | None = None  # of the prompt's, from the second on
    late: bool = False  # the row's logits wait for the host, see `LateSamples`
    reads_logits: bool = False  # the host is given the logits that wait for it, see `StepResult.logits`

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters which tokens came before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the row's join must have its `history`."""
        return self.counts_tokens or self.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class RowJoin:
    """A request takes a row; whatever the row held before is gone."""

    row: int
    request: int  # internal id, never reused
    sampling: RowSampling
    prompt_tokens: int = 1  # of the request as submitted, resumed or not; a rope that depends on length needs it
    history: Int32Array | None = None  # [known] prompt and known output, where `sampling.needs_history`

    def known(self) -> Int32Array:
        """The history that must be there."""
        if self.history is None:
            raise ValueError(f"request {self.request} joins row {self.row} without its history")
        return self.history


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that the host knows: a piece of a prompt, or of the known output of a resumed request."""

    row: int
    start: int  # absolute position of the first token
    token_ids: Int32Array  # [n], n >= 1
    samples: bool  # True when this reaches the last known token: the row's next token is sampled
    keeps: bool = False  # the same of a late row: the logits of the last token are kept for a later plan to sample from


@dataclass(frozen=True, slots=True)
class Fork:
    """A further choice of a request takes a row at the end of the prompt, whose logits are there for all of them.

    The row joins in this step; its blocks are in the table edits, shared with the chunk's row. From the chunk's
    last logits its first token is sampled, or where the chunk keeps them, they are kept for this row too.
    """

    chunk: int  # of the step's chunks: one that samples or keeps
    row: int


@dataclass(frozen=True, slots=True)
class RowBias:
    """Added to a late row's logits after the penalties; -inf bans."""

    token_ids: Int32Array  # [k] each once
    values: Float32Array  # [k]


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Stands in place of a late row's logits as they are before the temperature: whatever comes before that in the
    order of operations is in it already."""

    values: Float32Array  # [vocabulary]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What the host has to say about the next token of a late row."""

    mask: Mask | None = None  # None: all are legal
    bias: RowBias | RowLogits | None = None


@dataclass(frozen=True, slots=True)
class LateSamples:
    """The late rows that are sampled now, from the logits that an earlier step has kept for each of them.

    A late row is never among `decode_rows`. A step that computes its last known token leaves the logits in the row's
    own buffer. When the host has said its word (`Adjustment`), a later plan samples from them; a row about which it has
    not is left out of plans, and keeps its logits for as long as that takes.
    """

    rows: Int32Array  # [l] each once
    decoding: int  # the first so many compute the new token in this same step, and keep the logits that come of it
    masks: NDArray[np.uint32] | None  # [l, ceil(vocabulary / 32)] see `Mask`; None where no row has one
    biases: tuple[RowBias | RowLogits | None, ...]  # of each row


@dataclass(frozen=True, slots=True)
class TableEdits:
    """Block-table entries to set before the step runs: table[groups[i]][rows[i], indices[i]] = blocks[i].

    An entry is edited at most once a step. `indices[i]` counts blocks from position 0 of the request.
    """

    groups: Int32Array  # [e]
    rows: Int32Array  # [e]
    indices: Int32Array  # [e]
    blocks: Int32Array  # [e]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, executed in this order: joins, table edits, block copies, late samples, then the forward pass and
    sampling. The late samples' tokens are known to the host before the forward pass is over (`LateTokens`).

    `decode_rows` each compute one position: the row's own last sampled token, which never left the device, at
    the position after its last computed one. The same array object comes back while the set is unchanged
    (`decode_changed` is False); it is never mutated. A chunk may read what an earlier chunk of the same step writes: in
    each layer the keys and values of all rows are written before any are read.

    The step computes `decode_rows`, the first `late.decoding` of the late rows, and the chunks. It samples
    `decode_rows` in their order, then the chunks with `samples` in theirs, then the forks of such chunks.
    """

    step: int  # 0, 1, 2, … per engine
    joins: tuple[RowJoin, ...]
    tables: TableEdits
    copies: Int32Array  # [c, 2] (source block, destination block), within one cache group
    chunks: tuple[Chunk, ...]
    decode_rows: Int32Array  # [d]
    decode_changed: bool
    late: LateSamples | None = None
    forks: tuple[Fork, ...] = ()

    @property
    def num_sampled(self) -> int:
        """How many tokens the step's result holds."""
        chunks = self.chunks
        forked = sum(chunks[fork.chunk].samples for fork in self.forks)
        return len(self.decode_rows) + sum(chunk.samples for chunk in chunks) + forked

    @property
    def only_decodes(self) -> bool:
        """Whether nothing is computed or sampled but what `decode_rows` are for, and no row is taken."""
        return not (self.joins or self.chunks or self.forks) and self.late is None

    @property
    def num_tokens(self) -> int:
        """How many positions the step computes. None where it only samples late rows."""
        late = 0 if self.late is None else self.late.decoding
        return len(self.decode_rows) + late + sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class LateTokens:
    """The tokens of a step's late samples. `token_ids[i]`, or `NO_TOKEN`, is of `late.rows[i]` of *its own* plan."""

    step: int
    token_ids: Int32Array  # [l]
    logprobs: StepLogprobs | None = None  # None where no row asks; never of prompts


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of some positions, one after another: position i has the entries offsets[i] to offsets[i + 1].

    The first entry of a position is the token that is there; then come the most likely tokens, the first first, and
    then those that were asked for by id.
    """

    offsets: Int32Array  # [positions + 1]
    token_ids: Int32Array  # [entries]
    logprobs: NDArray[np.float32]  # [entries]
    ranks: Int32Array  # [entries] 1 is the most likely token; ties share the better rank

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def at(self, position: int) -> TokenScores:
        """One position by itself."""
        start, end = self.offsets[position : position + 2].tolist()
        some = slice(start, end)
        offsets = np.array([0, end - start], np.int32)
        return TokenScores(offsets, self.token_ids[some], self.logprobs[some], self.ranks[some])


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What the rows that ask for it get to know of a step's tokens."""

    samples: Int32Array  # [s] of the step's sampled tokens, those that are told about: indices of `token_ids`
    sampled: TokenScores  # of as many positions
    prompts: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of prompt tokens at the positions `start` and on, as far as a chunk's logits reach."""

    chunk: int  # of the step's chunks
    start: int
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step. `token_ids[i]`, or `NO_TOKEN`, is of the i-th sampled row of *its own* plan."""

    step: int
    token_ids: Int32Array  # [plan.num_sampled]
    logprobs: StepLogprobs | None = None  # None where no row asks
    logits: Float32Array | None = None
    """[r, vocabulary] what was kept for rows with `reads_logits`: late decoding rows, chunks, forks, each in their
    order. None where there are none."""
