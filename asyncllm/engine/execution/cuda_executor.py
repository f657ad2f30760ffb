"""Puts steps on the GPU, one after another: as the launch of a graph where there is one for the step, else by hand."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.cuda_device import CudaSpace, Graph
from asyncllm.engine.execution.cuda_embedder import DeviceText
from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.engine.execution.graph_sizes import graph_sizes, padding_before_capture
from asyncllm.engine.execution.logit_sampler import places_on
from asyncllm.engine.execution.prompt_scores import PromptReader
from asyncllm.engine.execution.step_outputs import StepOutputs, lay_out_outputs
from asyncllm.engine.execution.step_program import ByHand, ForkRows, StepKind, StepProgram
from asyncllm.engine.execution.step_ring import StepRing, host_words
from asyncllm.engine.execution.told_logits import StepTold
from asyncllm.engine.plan import Int32Array, LateTokens, RowJoin, StepPlan, StepResult
from asyncllm.kernels.block_copy import copy_blocks
from asyncllm.kernels.row_join import RECORD_WORDS
from asyncllm.kernels.sampled_rows import LogitRows

logger = logging.getLogger("asyncllm")

SAMPLER_TOKENS = 1
"""What a graph that samples with more than a step asks for counts as: a few launches that find nothing to do."""

_NO_PLACES = np.zeros(0, np.int64)
_NO_JOINS = np.zeros((0, RECORD_WORDS), np.int32)

MOST_FAILURES = 5
"""Captures of one size that may fail before its steps are launched by hand for good."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step samples."""

    places: NDArray[np.int64]  # of each sample in the ring's line
    told: StepTold | None  # the log-probabilities that they are to be told
    by_hand: ByHand | None  # what no graph does for them


@dataclass(frozen=True, slots=True)
class Launched:
    """What belongs to a step until it is complete."""

    kept: tuple[Tensor, ...]  # what its launches read
    places: NDArray[np.int64]  # of its samples in the ring's line
    told: StepTold | None  # the log-probabilities that it is to tell
    late_told: StepTold | None  # and those of its late samples
    read: Tensor | None  # [r, vocabulary] float32: the logits that the host reads


def read_result(plan: StepPlan, launched: Launched, ring: StepRing, turn: int) -> StepResult:
    """What came of a complete step."""
    places = launched.places
    token_ids = ring.read(turn, int(places.max(initial=-1)) + 1)[places]
    return StepResult(
        plan.step,
        token_ids,
        None if launched.told is None else launched.told.read(token_ids),
        None if launched.read is None else launched.read.numpy().copy(),
    )


def read_late(plan: StepPlan, launched: Launched, ring: StepRing, turn: int) -> LateTokens:
    """The late tokens of a step of which that much is complete."""
    assert plan.late is not None
    token_ids, told = ring.read_late(turn, len(plan.late.rows)), launched.late_told
    return LateTokens(plan.step, token_ids, None if told is None else told.read(token_ids))


class CudaExecutor:
    """Owns everything that is on the device. Used from one thread at a time, the device being the current one."""

    def __init__(self, space: CudaSpace, program: StepProgram, rows: DeviceRows, ring: StepRing, cache: Tensor) -> None:
        self._space = space
        self._program = program
        self._rows = rows
        self._ring = ring
        self._cache = cache
        self._settings = rows.settings  # those that the graphs hold
        self._adjusted = rows.adjustments.rows  # likewise
        self._requests = rows.scores.requests  # likewise
        self._sizes = graph_sizes(ring.layout.tokens)
        self._graphs: dict[StepKind, Graph | None] = {}  # None: it could not be captured
        self._padding = 0
        self._padding_left: dict[StepKind, int] = {}
        self._failures: dict[StepKind, int] = {}
        self._memory: MutableMapping[str, int] = {}
        self._lasting_bytes = 0
        self._uncaptured: StepKind | None = None
        self._decode_rows: Int32Array | None = None  # whose use of the sampler is known
        self._decode_use = SamplerUse.PLAIN

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where steps run."""
        return self._space.stream

    def serve(self, memory_bytes: MutableMapping[str, int]) -> None:
        """The first graphs are there: from now on, capture others only where they are worth it.

        Keeps the entries "workspace" of `memory_bytes`, which grows with what requests ask for, and "graphs": what is
        reserved beyond the sum of the other entries. Reads "weights".
        """
        self._padding = padding_before_capture(memory_bytes["weights"])
        self._memory = memory_bytes
        self._lasting_bytes = self._space.lasting_bytes()

    def enqueue(self, plan: StepPlan, turn: int, after_late: Callable[[], object] | None = None) -> Launched:
        """Launch a step, which is the `turn`th of the ring. `after_late` is called once its late samples are launched,
        before all else of it."""
        # Mostly the step's own launches let requests take rows, where it has chunks.
        joins = self._rows.describe(plan.joins) if plan.chunks else None
        kept = self._prepare(plan, () if joins is not None else plan.joins)
        edits = plan.tables
        tables = self._rows.tables
        entries = (edits.groups * tables.shape[1] + edits.rows) * tables.shape[2] + edits.indices
        room = self._ring.layout.edits if plan.num_tokens else 0
        if len(entries) > room:
            kept += self._edit_tables(entries[room:], edits.blocks[room:])
            entries = entries[:room]
        late_told: StepTold | None = None
        if plan.late is not None:
            late_told = self._told(plan.late.rows, np.arange(len(plan.late.rows)), turn, late=True)
            with self._space.entered():
                use = self._rows.adjustments.use(plan.late.rows.tolist())
                kept += tuple(self._program.sample_late(plan.late, use, late_told, turn))
            if after_late is not None:
                after_late()
        if not plan.num_tokens:
            with self._space.entered():
                self._program.skip()
            return Launched(kept, _NO_PLACES, None, late_told, None)
        outputs = lay_out_outputs(plan)
        kind = self._kind(plan)
        joins = _NO_JOINS if joins is None else joins
        self._ring.write(turn, plan, entries, joins, size=(kind.tokens, self._program.sampled(kind)))
        samples = self._samples(plan, outputs, turn)
        by_hand = samples.by_hand
        if (graph := self._graphs.get(kind)) is not None and by_hand is None:
            graph.launch()
        else:
            with self._space.entered():
                self._program.run(kind, by_hand)
            if by_hand is None and kind.tokens <= self._sizes[-1] and kind not in self._graphs:
                self._uncaptured = kind
        if by_hand is not None and by_hand.forks is not None:
            kept += by_hand.forks.kept
        read = self._rows.adjustments.read([row for row, _ in outputs.kept])
        return Launched(kept, samples.places, samples.told, late_told, self._read(read) if read else None)

    def _samples(self, plan: StepPlan, outputs: StepOutputs, turn: int) -> StepSamples:
        places = outputs.places
        if plan.forks:  # the samples of further choices come after all others
            forked = sum(plan.chunks[fork.chunk].samples for fork in plan.forks)
            places = places.copy()
            if forked:
                places[-forked:] = self._num_places(plan) + np.arange(forked)
        told, reader = self._told(outputs.rows, places, turn), self._reader(plan)
        if told is not None:
            told.logits = outputs.places
        elif reader is not None:
            told = StepTold(None, turn, (), places, outputs.places)
        if not plan.forks and reader is None and (told is None or not told.whole_places()):
            return StepSamples(places, told, None)
        forks = self._fork_rows(plan, outputs) if plan.forks else None
        return StepSamples(places, told, ByHand(told, reader, forks))

    def _told(self, rows: Int32Array, places: NDArray[np.int64], turn: int, *, late: bool = False) -> StepTold | None:
        """What the samples of these rows, at these places of the ring's line, are to be told."""
        scores = self._rows.scores
        asking = scores.asking(rows)
        return StepTold(scores.late_ring if late else scores.ring, turn, asking, places, places) if asking else None

    def _num_places(self, plan: StepPlan) -> int:
        late = 0 if plan.late is None else plan.late.decoding
        return len(plan.decode_rows) + late + sum(chunk.samples or chunk.keeps for chunk in plan.chunks)

    def _fork_rows(self, plan: StepPlan, outputs: StepOutputs) -> ForkRows:
        """On their way to the device."""
        device, kept = self._cache.device, list[Tensor]()
        ends = {fork.row: plan.chunks[fork.chunk].start + len(plan.chunks[fork.chunk].token_ids) for fork in plan.forks}
        where = {row: int(place) for row, place in zip(outputs.rows.tolist(), outputs.places, strict=True)}
        sampling = [row for row in ends if row in where]
        keeping = [(row, place) for row, place in outputs.kept if row in ends]
        first = self._num_places(plan)
        with self._space.entered():

            def put(numbers: Iterable[int]) -> Tensor:
                return places_on(device, list(numbers), kept)

            rows = put(sampling)
            size = self._program.vocabulary
            sampled = LogitRows(rows, put(ends[row] for row in sampling), put([len(sampling)]), size)
            return ForkRows(
                rows=put(ends),
                positions=put(ends.values()),
                first=first,
                total=put([first + len(sampling)]),
                places=put(where[row] for row in sampling) if sampling else None,
                sampled=sampled,
                keeping=put(row for row, _ in keeping) if keeping else None,
                keeping_places=put(place for _, place in keeping),
                kept=tuple(kept),
            )

    def _read(self, rows: Sequence[int]) -> Tensor:
        """The kept logits of these rows [r, vocabulary], on their way to the host."""
        all_kept = self._rows.adjustments.kept
        assert all_kept is not None
        pinned: list[Tensor] = []
        with self._space.entered():
            some = all_kept.index_select(0, places_on(self._cache.device, list(rows), pinned)).float()
            copy = torch.empty(some.shape, dtype=some.dtype, pin_memory=some.device.type == "cuda")
            return copy.copy_(some, non_blocking=True)

    def capture(self) -> None:
        """Make a graph of the step just enqueued, if it lacks one: the next of its kind is launched by it."""
        kind, self._uncaptured = self._uncaptured, None
        if kind is None:
            return
        self._graphs[kind] = None
        try:
            with self._space.capture() as graph:
                self._program.run(kind)
        except Exception:
            # A host that waits for the whole device meanwhile spoils a capture. A real fault shows in the next launch.
            self._failures[kind] = failures = self._failures.get(kind, 0) + 1
            if failures < MOST_FAILURES:
                del self._graphs[kind]
                self._padding_left[kind] = self._padding
            logger.warning("no graph for %s, %d times", kind, failures, exc_info=True)
            return
        self._graphs[kind] = graph
        logger.debug("captured a graph for %s", kind)
        if self._memory:
            others = sum(size for name, size in self._memory.items() if name != "graphs")
            self._memory["graphs"] = max(0, self._space.reserved_bytes() - others)

    def capture_unrun(self, plan: StepPlan) -> None:
        """Make a graph of steps like this one, if they lack it, without running it: all its kernels are loaded, and
        there is memory for what passes between them."""
        kind = self._kind(plan)
        if kind not in self._graphs:
            self._uncaptured = kind
            self.capture()

    def recover(self, turn: int) -> None:
        """After an `enqueue` that raised half-way: wait for what was launched of it, and go on at `turn`."""
        with self._space.entered():
            self._space.stream.synchronize()
            self._program.turn.fill_(turn)

    def text(self, token_ids: Int32Array) -> DeviceText:
        """What computes the embedding of a text, on the thread that launches steps. Close it before the executor."""
        row_blocks = self._rows.tables.shape[2]
        text = DeviceText(
            self._space, self._program, self._cache.dtype, token_ids, sizes=self._sizes, row_blocks=row_blocks
        )
        self._note_lasting()
        return text

    def close(self, *, faulty: bool) -> None:
        """Give everything back. All steps are complete, or the device is `faulty`."""
        if faulty:
            self._space.abandon()
        else:
            self._drop_graphs()
        del self._program, self._rows, self._ring, self._cache, self._settings
        self._space.close()

    def _prepare(self, plan: StepPlan, joins: Sequence[RowJoin]) -> tuple[Tensor, ...]:
        """What is launched before the step's own launches, with these joins. Most steps need none of it, which matters:
        each launch, and each tensor made, gives the interpreter lock up, and re-taking it can cost 5 ms."""
        kept: tuple[Tensor, ...] = ()
        if joins:
            with self._space.lasting():
                kept = self._rows.join(joins)
            self._forget_outgrown()
        if self._rows.adjustments.counting or len(plan.copies):
            with self._space.entered():
                kept += self._rows.adjustments.take_chunks(plan.chunks)
                if len(plan.copies):
                    kept += (self.copy_blocks(plan.copies),)
        return kept

    def copy_blocks(self, pairs: Int32Array) -> Tensor:
        """Launch the copies of blocks to others, in pairs [c, 2]. Keep what is returned until the device has passed
        this."""
        words = host_words(pairs, self._cache.device)
        copy_blocks(self._cache, words)
        return words

    def _forget_outgrown(self) -> None:
        """Rare: a request asks for what none has before, or has more suppressed ids, biases or named ids."""
        before = self._settings, self._adjusted, self._requests
        now = self._rows.settings, self._rows.adjustments.rows, self._rows.scores.requests
        self._settings, self._adjusted, self._requests = now
        if all(old is new for old, new in zip(before, now, strict=True)):
            return
        self._note_lasting()
        if all(old is None or old is new for old, new in zip(before, now, strict=True)):
            return  # no graph can hold what was not there
        self._space.stream.synchronize()
        self._drop_graphs()

    def _note_lasting(self) -> None:
        if self._memory:
            lasting, self._lasting_bytes = self._lasting_bytes, self._space.lasting_bytes()
            self._memory["workspace"] += self._lasting_bytes - lasting

    def _edit_tables(self, entries: Int32Array, blocks: Int32Array) -> tuple[Tensor, ...]:
        """The edits that a line of the ring has no room for."""
        device = self._cache.device
        kept = host_words(entries.astype(np.int64), device), host_words(blocks, device)
        with self._space.entered():
            where, what = (words.to(device, non_blocking=True) for words in kept)
            self._rows.tables.view(-1).index_copy_(0, where, what)
        return kept

    def _kind(self, plan: StepPlan) -> StepKind:
        """The smallest kind that has a graph, or is to get one."""
        chunks = bool(plan.chunks)
        tokens = plan.num_tokens
        use = self._use(plan)
        if tokens > self._sizes[-1]:
            return StepKind(tokens, chunks, use)
        index = bisect_left(self._sizes, tokens)
        best = StepKind(self._sizes[index], chunks, use)
        if best not in self._graphs:
            left = self._padding_left.setdefault(best, self._padding)
            if left > 0:
                for size in self._sizes[index:]:
                    for more in list(SamplerUse)[use:]:
                        if (kind := StepKind(size, chunks, more)) in self._graphs:
                            self._padding_left[best] = left - (size - tokens) - SAMPLER_TOKENS * (more > use)
                            return kind
        return best

    def _reader(self, plan: StepPlan) -> PromptReader | None:
        """Of the log-probabilities that the step's chunks tell of prompts."""
        parts = self._rows.prompt_parts(plan.chunks)
        if not parts:
            return None
        decoding = len(plan.decode_rows) + (0 if plan.late is None else plan.late.decoding)
        counts = np.array([len(chunk.token_ids) for chunk in plan.chunks])
        return PromptReader(parts, decoding + np.cumsum(counts) - counts)

    def _use(self, plan: StepPlan) -> SamplerUse:
        """What the step's rows ask of the sampler. The decoding ones are looked at again only where they change."""
        adjustments = self._rows.adjustments
        if not adjustments.in_use:
            return SamplerUse.PLAIN
        if plan.decode_rows is not self._decode_rows or plan.joins:
            self._decode_rows = plan.decode_rows
            self._decode_use = adjustments.use(plan.decode_rows.tolist())
        others = [*(chunk.row for chunk in plan.chunks), *(fork.row for fork in plan.forks)]
        if plan.late is not None:
            others += plan.late.rows[: plan.late.decoding].tolist()
        return max(self._decode_use, adjustments.use(others)) if others else self._decode_use

    def _drop_graphs(self) -> None:
        for graph in self._graphs.values():
            if graph is not None:
                graph.destroy()
        self._graphs.clear()
