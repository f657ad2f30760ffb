"""A step's tokens, made on the device of the few words that the host writes about it and of the rows' state.

The host writes into a ring of steps in pinned memory, where the kernel reads them: no copy, and nothing of a step is in
the launch itself, so that a CUDA graph replays any step of its size. `turn`, on the device, says whose turn it is;
`token_output` moves it on.

Where requests take rows that have no more than settings, the step's first launch writes these too (`row_join`).

The batch has the decoding rows first, one token each, then the chunks. Row r's decoding token is its last sampled one,
at the position after its last computed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.attention_plan import Sequences
from asyncllm.kernels.language import ceil_div, jit, tl
from asyncllm.kernels.row_join import JOIN_SETTINGS, RECORD_WORDS, join_rows_reference, take_row

NUM_DECODE, NUM_CHUNKS, NUM_TOKENS, NUM_SAMPLED, NUM_EDITS, SIZE_TOKENS, SIZE_SAMPLED, NUM_JOINS = range(8)
"""The first words of a step. Two are how many tokens and samples its launches are made for; what is beyond the step's
own is filled up with token 0."""

_HEADER = 8
_ALIGNMENT = 16
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class StepWords:
    """Where what lies in the int32 words of a step. Every property but `size` is an offset."""

    rows: int  # room for so many rows, decoding ones or chunks
    edits: int  # room for so many edits of block tables
    tokens: int  # room for so many tokens of chunks

    @property
    def decode_rows(self) -> int:
        """[rows]: the decoding rows."""
        return _HEADER

    @property
    def chunk_rows(self) -> int:
        """[rows]: the row of each chunk."""
        return _HEADER + self.rows

    @property
    def chunk_starts(self) -> int:
        """[rows]: the position of each chunk's first token."""
        return _HEADER + 2 * self.rows

    @property
    def chunk_samples(self) -> int:
        """[rows]: 1 for a chunk after which the row samples, else 0."""
        return _HEADER + 3 * self.rows

    @property
    def chunk_places(self) -> int:
        """[rows]: the place of that sample among all of the step."""
        return _HEADER + 4 * self.rows

    @property
    def chunk_firsts(self) -> int:
        """[rows + 1]: where in the batch each chunk begins; after the last chunk, the number of tokens."""
        return _HEADER + 5 * self.rows

    @property
    def edit_entries(self) -> int:
        """[edits]: entries of the block tables, seen as one line."""
        return _HEADER + 6 * self.rows + 1

    @property
    def edit_blocks(self) -> int:
        """[edits]: what to set them to."""
        return self.edit_entries + self.edits

    @property
    def joins(self) -> int:
        """[rows, RECORD_WORDS]: the records of requests that take rows."""
        return self.edit_blocks + self.edits

    @property
    def chunk_tokens(self) -> int:
        """[tokens]: the tokens of all chunks."""
        return self.joins + self.rows * RECORD_WORDS

    @property
    def size(self) -> int:
        """Words of a step."""
        return ceil_div(self.chunk_tokens + self.tokens, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The step's tokens on the device, all int32. What lies beyond the size of a step's launches keeps older values."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    rows: torch.Tensor  # [tokens]
    num_tokens: torch.Tensor  # [1]
    sequences: Sequences  # of the decoding rows, then of the chunks
    sampled: torch.Tensor  # [rows]: the tokens after which a row samples
    sampled_rows: torch.Tensor  # [rows]
    sampled_positions: torch.Tensor  # [rows]: of the tokens to be sampled
    num_sampled: torch.Tensor  # [1]


def make_step_arrays(words: StepWords, max_tokens: int, device: torch.device) -> StepArrays:
    """Allocate for steps of up to `max_tokens` tokens."""

    def make(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return StepArrays(
        token_ids=make(max_tokens),
        positions=make(max_tokens),
        rows=make(max_tokens),
        num_tokens=make(1),
        sequences=Sequences(
            query_starts=make(words.rows + 1),
            context_lens=make(words.rows),
            rows=make(words.rows),
            num_sequences=make(1),
        ),
        sampled=make(words.rows),
        sampled_rows=make(words.rows),
        sampled_positions=make(words.rows),
        num_sampled=make(1),
    )


@jit
def _step_layout_kernel(
    words: tl.tensor,
    turn: tl.tensor,
    tables: tl.tensor,
    next_positions: tl.tensor,
    last_tokens: tl.tensor,
    settings: tl.tensor,
    seeds: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    sequence_rows: tl.tensor,
    num_sequences: tl.tensor,
    sampled: tl.tensor,
    sampled_rows: tl.tensor,
    sampled_positions: tl.tensor,
    num_sampled: tl.tensor,
    line_size: tl.int32,
    at_decode_rows: tl.int32,
    at_chunk_rows: tl.int32,
    at_chunk_starts: tl.int32,
    at_chunk_samples: tl.int32,
    at_chunk_places: tl.int32,
    at_chunk_firsts: tl.int32,
    at_edit_entries: tl.int32,
    at_edit_blocks: tl.int32,
    at_joins: tl.int32,
    at_chunk_tokens: tl.int32,
    settings_rows: tl.int32,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    step = words + tl.load(turn) * line_size
    decoding = tl.load(step)
    chunks = tl.load(step + 1)
    tokens = tl.load(step + 2)
    samples = tl.load(step + 3)
    lanes = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if program == 0:
        for first in range(0, decoding, BLOCK):
            i = first + lanes
            inside = i < decoding
            row = tl.load(step + at_decode_rows + i, mask=inside, other=0)
            position = tl.load(next_positions + row, mask=inside, other=0)
            tl.store(token_ids + i, tl.load(last_tokens + row, mask=inside, other=0), mask=inside)
            tl.store(positions + i, position, mask=inside)
            tl.store(rows + i, row, mask=inside)
            tl.store(query_starts + i, i, mask=inside)
            tl.store(context_lens + i, position + 1, mask=inside)
            tl.store(sequence_rows + i, row, mask=inside)
            tl.store(sampled + i, i, mask=inside)
            tl.store(sampled_rows + i, row, mask=inside)
            tl.store(sampled_positions + i, position + 1, mask=inside)
            tl.store(next_positions + row, position + 1, mask=inside)
    elif program == 1:
        edits = tl.load(step + 4)
        size = tl.load(step + 5)
        sampled_size = tl.load(step + 6)
        tl.store(num_tokens, tokens)
        tl.store(num_sequences, decoding + chunks)
        tl.store(num_sampled, samples)
        tl.store(query_starts + decoding + chunks, tokens)
        for first in range(0, edits, BLOCK):
            i = first + lanes
            entry = tl.load(step + at_edit_entries + i, mask=i < edits, other=0)
            tl.store(tables + entry, tl.load(step + at_edit_blocks + i, mask=i < edits, other=0), mask=i < edits)
        zeros = tl.zeros([BLOCK], tl.int32)
        for first in range(tokens, size, BLOCK):
            i = first + lanes
            tl.store(token_ids + i, zeros, mask=i < size)
            tl.store(positions + i, zeros, mask=i < size)
            tl.store(rows + i, zeros, mask=i < size)
        for first in range(samples, sampled_size, BLOCK):
            i = first + lanes
            tl.store(sampled + i, zeros, mask=i < sampled_size)
    else:
        chunk = program - 2
        for join in range(chunk, tl.load(step + 7), tl.num_programs(0) - 2):
            take_row(step + at_joins + join * RECORD, settings, seeds, settings_rows)
        if chunk < chunks:
            row = tl.load(step + at_chunk_rows + chunk)
            start = tl.load(step + at_chunk_starts + chunk)
            begin = tl.load(step + at_chunk_firsts + chunk)
            count = tl.load(step + at_chunk_firsts + chunk + 1) - begin
            for first in range(0, count, BLOCK):
                i = first + lanes
                token = tl.load(step + at_chunk_tokens + begin - decoding + i, mask=i < count, other=0)
                tl.store(token_ids + begin + i, token, mask=i < count)
                tl.store(positions + begin + i, start + i, mask=i < count)
                tl.store(rows + begin + i, row + tl.zeros([BLOCK], tl.int32), mask=i < count)
            tl.store(query_starts + decoding + chunk, begin)
            tl.store(context_lens + decoding + chunk, start + count)
            tl.store(sequence_rows + decoding + chunk, row)
            tl.store(next_positions + row, start + count)
            if tl.load(step + at_chunk_samples + chunk) > 0:
                place = tl.load(step + at_chunk_places + chunk)
                tl.store(sampled + place, begin + count - 1)
                tl.store(sampled_rows + place, row)
                tl.store(sampled_positions + place, start + count)


def lay_out_step(
    words: torch.Tensor,
    turn: torch.Tensor,
    layout: StepWords,
    arrays: StepArrays,
    *,
    tables: torch.Tensor,
    next_positions: torch.Tensor,
    last_tokens: torch.Tensor,
    settings: torch.Tensor,
    seeds: torch.Tensor,
    chunks: int,
) -> None:
    """Let requests take rows, apply the step's table edits, lay out its tokens and move its rows on to their next
    positions.

    words [steps, layout.size] int32, in pinned memory of the host or on the device; turn [1] int32: the step's line in
    it; tables [groups, rows, blocks] int32, dense; next_positions and last_tokens [rows] int32; settings and seeds as
    in `join_rows`. The step has at most `chunks` chunks; one without any has no joins.
    """
    _step_layout_kernel[(2 + chunks,)](
        words,
        turn,
        tables,
        next_positions,
        last_tokens,
        settings,
        seeds.view(torch.int32),
        arrays.token_ids,
        arrays.positions,
        arrays.rows,
        arrays.num_tokens,
        arrays.sequences.query_starts,
        arrays.sequences.context_lens,
        arrays.sequences.rows,
        arrays.sequences.num_sequences,
        arrays.sampled,
        arrays.sampled_rows,
        arrays.sampled_positions,
        arrays.num_sampled,
        line_size=layout.size,
        at_decode_rows=layout.decode_rows,
        at_chunk_rows=layout.chunk_rows,
        at_chunk_starts=layout.chunk_starts,
        at_chunk_samples=layout.chunk_samples,
        at_chunk_places=layout.chunk_places,
        at_chunk_firsts=layout.chunk_firsts,
        at_edit_entries=layout.edit_entries,
        at_edit_blocks=layout.edit_blocks,
        at_joins=layout.joins,
        at_chunk_tokens=layout.chunk_tokens,
        settings_rows=settings.shape[1],
        RECORD=RECORD_WORDS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def lay_out_step_reference(
    words: torch.Tensor,
    turn: torch.Tensor,
    layout: StepWords,
    arrays: StepArrays,
    *,
    tables: torch.Tensor,
    next_positions: torch.Tensor,
    last_tokens: torch.Tensor,
    settings: torch.Tensor,
    seeds: torch.Tensor,
) -> None:
    """`lay_out_step` in plain torch, sequence by sequence."""
    step = words[int(turn)].to(tables.device)
    decoding, chunks, tokens, samples, edits, size, sampled_size, joins = step[:_HEADER].tolist()
    records = step[layout.joins :][: joins * RECORD_WORDS].view(joins, RECORD_WORDS).clone()
    records[:, JOIN_SETTINGS.index("num_suppressed")] = 0
    nothing = step.new_zeros(settings.shape[1], 0)
    join_rows_reference(settings, seeds, nothing, records, nothing[0])
    entries = step[layout.edit_entries : layout.edit_entries + edits].long()
    tables.view(-1)[entries] = step[layout.edit_blocks : layout.edit_blocks + edits]
    sequences = arrays.sequences
    arrays.num_tokens[0], sequences.num_sequences[0], arrays.num_sampled[0] = tokens, decoding + chunks, samples
    sequences.query_starts[decoding + chunks] = tokens
    for array in (arrays.token_ids, arrays.positions, arrays.rows):
        array[tokens:size] = 0
    arrays.sampled[samples:sampled_size] = 0
    for i in range(decoding + chunks):
        if i < decoding:
            row, begin, count, place = int(step[layout.decode_rows + i]), i, 1, i
            start, ids = int(next_positions[row]), last_tokens[row]
        else:
            chunk = i - decoding
            row, start = int(step[layout.chunk_rows + chunk]), int(step[layout.chunk_starts + chunk])
            begin, end = step[layout.chunk_firsts + chunk :][:2].tolist()
            count, place = end - begin, int(step[layout.chunk_places + chunk])
            ids = step[layout.chunk_tokens + begin - decoding :][:count]
        arrays.token_ids[begin : begin + count] = ids
        arrays.positions[begin : begin + count] = torch.arange(start, start + count)
        arrays.rows[begin : begin + count] = row
        sequences.query_starts[i], sequences.context_lens[i], sequences.rows[i] = begin, start + count, row
        next_positions[row] = start + count
        if i < decoding or step[layout.chunk_samples + i - decoding]:
            arrays.sampled[place], arrays.sampled_rows[place] = begin + count - 1, row
            arrays.sampled_positions[place] = start + count
