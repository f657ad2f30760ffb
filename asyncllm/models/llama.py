"""The Llama architecture: Llama, Mistral, Qwen2, Qwen3, SmolLM2 and all that share its shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from asyncllm.layers.attention import HeadShape, LayerCache, NormedAttention
from asyncllm.layers.embedding import make_embedding
from asyncllm.layers.kernel_decoder import DecoderEnds, KernelDecoder, give_float32, make_kernel_decoder
from asyncllm.layers.linear import WeightedLayer, make_gated_linear, make_linear
from asyncllm.layers.norm import make_rms_norm
from asyncllm.layers.paged_attention import NormedPagedAttention, make_attention
from asyncllm.layers.parameter import CheckpointTensor, Loadable, Placement, Slot
from asyncllm.layers.residual import Residual
from asyncllm.layers.rope import Rotation, TabledRotation, make_rotary_embedding
from asyncllm.models.configuration import Family, ModelConfig
from asyncllm.models.forward_batch import ForwardBatch

LLAMA = Family(
    qkv_bias=None,
    output_bias=None,
    mlp_bias=None,
    qk_norm=False,
    every_window=False,
    typed_windows=False,
    default_window=None,
    default_kv_heads=None,
)
MISTRAL = Family(
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    every_window=True,
    typed_windows=False,
    default_window=4096,
    default_kv_heads=8,
)
QWEN2 = Family(
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    every_window=False,
    typed_windows=True,
    default_window=4096,
    default_kv_heads=32,
)
QWEN3 = Family(
    qkv_bias=None,
    output_bias=None,
    mlp_bias=False,
    qk_norm=True,
    every_window=False,
    typed_windows=True,
    default_window=4096,
    default_kv_heads=32,
    default_head_dim=128,
)


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, cache: LayerCache, placement: Placement) -> None:
        shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = make_rms_norm(hidden, config.norm_eps, placement)
        self.qkv = make_linear(
            hidden,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.qkv_bias,
            placement=placement,
        )
        self.attention = make_attention(shape, cache, config.norm_eps if config.qk_norm else None, placement)
        self.output = make_linear(queries, {"o_proj": hidden}, bias=config.output_bias, placement=placement)
        self.mlp_norm = make_rms_norm(hidden, config.norm_eps, placement)
        self.gate_up = make_gated_linear(
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            config.activation,
            bias=config.mlp_bias,
            placement=placement,
        )
        self.down = make_linear(inner, {"down_proj": hidden}, bias=config.mlp_bias, placement=placement)

    def __call__(self, residual: Residual, rotation: Rotation | TabledRotation, batch: ForwardBatch) -> None:
        """Add to the stream."""
        group = batch.attention[self.attention.cache.group]
        qkv = self.qkv.normed(residual, self.attention_norm)
        self.output.add(self.attention(qkv, rotation, batch.cache, group), residual)
        self.down.add(self.gate_up.normed(residual, self.mlp_norm), residual)

    def linears(self) -> Iterator[tuple[str, WeightedLayer]]:
        """The products, with the part of their names that stands before theirs."""
        yield "self_attn.", self.qkv
        yield "self_attn.", self.output
        yield "mlp.", self.gate_up
        yield "mlp.", self.down

    def norm_slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint tensors of this layer that are no product's, under `prefix`."""
        yield f"{prefix}input_layernorm.weight", self.attention_norm.slot()
        if isinstance(self.attention, NormedAttention | NormedPagedAttention):
            yield from self.attention.slots(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self.mlp_norm.slot()

    def slots(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        yield from self.norm_slots(prefix)
        for name, linear in self.linears():
            yield from linear.slots(prefix + name)


class Llama:
    """Token ids to logits."""

    def __init__(
        self, config: ModelConfig, caches: Sequence[LayerCache], max_length: int, placement: Placement
    ) -> None:
        """`caches` says for each layer where its keys and values are; positions stay below `max_length`."""
        self.config = config
        self.embedding = make_embedding(config.vocab_size, config.hidden_size, placement)
        self.rotary = make_rotary_embedding(config.rope, config.head_dim, max_length, placement)
        self.layers = [DecoderLayer(config, cache, placement) for cache in caches]
        self.norm = make_rms_norm(config.hidden_size, config.norm_eps, placement)
        # a head that is tied has no weight of its own
        self.head = make_linear(
            config.hidden_size,
            {"lm_head": 0 if config.tied_head else config.vocab_size},
            bias=False,
            placement=placement,
        )
        self.decoder: KernelDecoder | None = None
        self._embedding_slot = self.head.tie(self.embedding.weight) if config.tied_head else self.embedding.slot()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of the sampled tokens: [s, vocab_size], in the dtype of the weights or in float32."""
        if self.decoder is not None and self.decoder.has_head and batch.layers is not None:
            return self.decoder.logits(batch.token_ids, batch.lengths, batch.sampled, batch.layers)
        return self.head.normed(self._residual(batch), self.norm)

    def draw(self, batch: ForwardBatch) -> None:
        """What a `KernelBatch` draws of the sampled tokens' logits, which nobody sees; for a model that does so."""
        assert self.decoder is not None
        assert batch.layers is not None
        self.decoder.draw(batch.token_ids, batch.lengths, batch.sampled, batch.layers)

    def features(self, batch: ForwardBatch) -> Tensor:
        """What the head makes logits of, at the sampled tokens: [s, hidden_size]."""
        return self.norm.of(self._residual(batch))

    def _residual(self, batch: ForwardBatch) -> Residual:
        """What the layers leave at the sampled tokens: [s, hidden_size]."""
        if self.decoder is not None and batch.layers is not None:
            residual = self.decoder(batch.token_ids, batch.lengths, batch.layers)
        else:
            rotation = self.rotary(batch.positions, batch.lengths)
            residual = Residual(self.embedding(batch.token_ids))
            for layer in self.layers:
                layer(residual, rotation, batch)
        return residual if batch.sampled is None else Residual(residual.settle().index_select(0, batch.sampled))

    def join_layers(self) -> None:
        """Once the weights are there: make one kernel of all layers, where the processor has it."""
        ends = DecoderEnds(self.embedding.weight, self.norm, self.head)
        self.decoder = make_kernel_decoder(self.layers, ends, self.rotary)
        give_float32(self.head)

    @property
    def draws_tokens(self) -> bool:
        """Whether it has what `draw` needs."""
        return self.decoder is not None and self.decoder.has_head

    def slots(self) -> Iterator[tuple[str, Loadable]]:
        """Every checkpoint tensor by its Hugging Face name; the head only where it is not tied."""
        yield "model.embed_tokens.weight", self._embedding_slot
        for index, layer in enumerate(self.layers):
            yield from layer.slots(f"model.layers.{index}.")
        yield "model.norm.weight", self.norm.slot()
        if not self.config.tied_head:
            yield from self.head.slots("")

    def weight_bytes(self) -> int:
        """Size of all parameters."""
        own = [self.embedding.slot(), self.norm.slot()]
        own += [slot for layer in self.layers for _, slot in layer.norm_slots("")]
        return sum(slot.target.nbytes for slot in own) + sum(linear.weight_bytes for linear in self._linears())

    def copy_bytes(self) -> int:
        """Size of copies of parameters in a form that suits other steps."""
        return sum(linear.copy_bytes for linear in self._linears())

    def rotation_bytes(self) -> int:
        """Size of the tables that rotations are looked up in."""
        return self.rotary.memory_bytes() + (0 if self.decoder is None else self.decoder.table_bytes())

    def untie_head(self, weight: CheckpointTensor) -> None:
        """Give a model whose config ties the head one of its own."""
        self.head.replace(weight)

    def _linears(self) -> Iterator[WeightedLayer]:
        for layer in self.layers:
            yield from (linear for _, linear in layer.linears())
        yield self.head
