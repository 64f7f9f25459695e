"""Runs a Llama or Qwen3 target in native code: the default on CPUs. No torch.

One call is one pass over the whole batch. Every row's numbers are the same bits whatever else is in the pass,
however a prompt is cut into chunks and wherever its pages lie (native/kernels.hpp states the law).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from dspark_plugins.native.binding import (
    CHAIN,
    DTYPES,
    MASK,
    Arena,
    DecoderShape,
    Matrix,
    NativeDecoder,
    NativeError,
    Pass,
    Pool,
)
from dspark_plugins.native.rope import RopeTable
from dspark_plugins.native.threads import default_num_threads

from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.interface import Float32, Int32, StepBatch, TargetOutput
from dspark.models.config import DecoderConfig, TargetConfig, WeightSource
from dspark.models.rope import inverse_frequencies

__all__ = [
    "NativeTarget",
    "check_array",
    "check_dtype",
    "check_pages",
    "check_range",
    "check_slots",
    "load_decoder",
]


def check_dtype(dtype: str) -> None:
    """Raise ConfigError unless native code computes in `dtype`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, allowed with the native executor are {', '.join(DTYPES)}")


class NativeTarget:
    """The target model; a `TargetExecutor`."""

    name = "native"

    def __init__(
        self,
        config: TargetConfig,
        weights: WeightSource,
        *,
        dtype: str,
        feature_layer_ids: Sequence[int] = (),
        num_threads: int | None = None,
        pin_threads: bool = False,
        touch_cache: bool = False,
        max_rows: int = 16384,
    ) -> None:
        """Pack the weights, one tensor at a time; the source is not kept.

        Arguments:
            dtype: float32, bfloat16 or int8 weights. The cache is float32 for float32, else bfloat16.
            feature_layer_ids: layers whose outputs every pass returns; -1 = the embedding output.
            num_threads: None takes DSPARK_NUM_THREADS or the processors this process may use.
            pin_threads: bind worker threads to processors.
            touch_cache: `allocate_cache` takes the cache's memory from the system, not the passes that first use it.
            max_rows: the most rows of one pass.

        Raises:
            ConfigError: an unknown dtype, a feature layer that does not exist, no room for the weights.
            CheckpointError: a missing tensor, or one of the wrong shape.
        """
        check_dtype(dtype)
        self.config, self.dtype = config, dtype
        self.feature_layer_ids = tuple(feature_layer_ids)
        num_layers = config.decoder.num_layers
        for layer_id in self.feature_layer_ids:
            if not -1 <= layer_id < num_layers:
                raise ConfigError(f"feature layer is {layer_id}, allowed is -1 to {num_layers - 1}")
        threads = default_num_threads() if num_threads is None else num_threads
        if not 1 <= threads <= 256:
            raise ConfigError(f"num_threads is {threads}, allowed is 1 to 256")
        self.max_rows = max_rows
        self._touch_cache = touch_cache
        self._taps = np.array(self.feature_layer_ids, np.int32)
        self._page_size = self._num_pages = 0
        self._rope = RopeTable(*inverse_frequencies(config.decoder.rope, config.decoder.head_dim))
        try:
            self.pool, self.arena = Pool(threads, pin=pin_threads), Arena()
            self._decoder = load_decoder(config.decoder, weights, self.pool, self.arena, dtype=dtype)
            self._decoder.set_norm(0, "final", _vector(weights, "norm.weight", config.decoder.hidden_size))
            self.embedding = self._matrix(weights, "embed_tokens.weight")
            tied = config.tie_word_embeddings
            self.head = self.embedding if tied else self._matrix(weights, "lm_head.weight")
            self._decoder.set_ends(self.embedding, self.head)
        except NativeError as error:
            raise ConfigError(f"executor native: {error}") from error

    def _matrix(self, weights: WeightSource, name: str) -> Matrix:
        shape = (self.config.vocab_size, self.config.decoder.hidden_size)
        matrix = Matrix(self.arena, self.pool, dtype=self.dtype, num_outputs=shape[0], num_inputs=shape[1])
        matrix.pack(_tensor(weights, name, shape))
        return matrix

    @property
    def num_threads(self) -> int:
        return self.pool.num_threads

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, all of which one pass reads once."""
        return self.arena.num_bytes

    def embedding_and_head(self) -> tuple[Float32, Float32]:
        ids = np.arange(self.config.vocab_size, dtype=np.int32)
        embedding = self.embedding.rows(ids)
        return embedding, embedding if self.head is self.embedding else self.head.rows(ids)

    # Caches

    def cache_page_bytes(self, page_size: int) -> int:
        decoder = self.config.decoder
        element = 4 if self.dtype == "float32" else 2
        padded = -(-decoder.head_dim // 16) * 16  # values are padded to whole vectors
        return decoder.num_layers * page_size * decoder.num_kv_heads * (decoder.head_dim + padded) * element

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the caches.

        Raises:
            CapacityError: when the machine has not that much memory.
        """
        if num_pages < 1 or page_size < 1 or num_pages * page_size >= 2**31:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens: allowed are 1 to 2^31 - 1 tokens"
            )
        self._num_pages = 0  # the old cache is gone whether or not there is memory for the new one
        try:
            self._decoder.allocate_cache(num_pages * page_size)
            if self._touch_cache:
                self._decoder.touch_cache()
        except NativeError as error:
            need = num_pages * self.cache_page_bytes(page_size)
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens needs {need} bytes: {error}"
            ) from error
        self._num_pages, self._page_size = num_pages, page_size

    def move_cache(self, *, from_slots: Int32, to_slots: Int32) -> None:
        """Copy K/V of every layer from slot to slot [N], one after the other in order.

        Raises:
            EngineError: no cache yet, or slots outside it.
        """
        self._need_cache()
        check_array("from_slots", from_slots, (len(from_slots),))
        check_array("to_slots", to_slots, (len(from_slots),))
        for name, slots in (("from_slots", from_slots), ("to_slots", to_slots)):
            check_range(name, slots, 0, self._num_pages * self._page_size - 1)
        self._decoder.move_cache(from_slots, to_slots)

    # The pass

    def forward(self, batch: StepBatch) -> TargetOutput:
        """Run one pass.

        Raises:
            EngineError: a batch that does not fit its own description, this model or its cache, or no memory for it.
        """
        self._check(batch)
        num_rows, num_picked = len(batch.tokens), len(batch.logit_rows)
        self._rope.reach(int(batch.positions.max()) + 1)
        vocab_size, hidden_size = self.config.vocab_size, self.config.decoder.hidden_size
        logits = np.empty((num_picked, vocab_size), np.float32)
        argmax = np.empty(num_picked, np.int32)
        finite = np.empty(num_picked, np.bool_)
        features = (
            np.empty((num_rows, len(self._taps) * hidden_size), np.float32) if len(self._taps) else None
        )
        ancestors = batch.ancestors
        try:
            self._decoder.forward(
                Pass(
                    num_rows=num_rows,
                    num_sequences=len(batch.context_len),
                    max_pages=batch.page_table.shape[1],
                    page_size=self._page_size,
                    mask_words=0 if ancestors is None else ancestors.shape[1],
                    visibility=CHAIN if ancestors is None else MASK,
                    num_logit_rows=num_picked,
                    num_taps=len(self._taps),
                    logits_width=vocab_size,
                    tokens=batch.tokens.ctypes.data,
                    positions=batch.positions.ctypes.data,
                    query_start=batch.query_start.ctypes.data,
                    context_len=batch.context_len.ctypes.data,
                    page_table=batch.page_table.ctypes.data,
                    slots=batch.slots.ctypes.data,
                    ancestors=None if ancestors is None else ancestors.ctypes.data,
                    logit_rows=batch.logit_rows.ctypes.data,
                    taps=self._taps.ctypes.data,
                    cos=self._rope.cos.ctypes.data,
                    sin=self._rope.sin.ctypes.data,
                    features=None if features is None else features.ctypes.data,
                    logits=logits.ctypes.data,
                    argmax=argmax.ctypes.data,
                    finite=finite.ctypes.data,
                )
            )
        except NativeError as error:
            raise EngineError(f"a pass of {num_rows} rows: {error}") from error
        return TargetOutput(logits=logits, argmax=argmax, finite=finite, features=features)

    def _need_cache(self) -> None:
        if not self._num_pages:
            raise EngineError("the target has no cache: allocate the cache first")

    def _check(self, batch: StepBatch) -> None:
        self._need_cache()
        num_rows, num_sequences = batch.tokens.size, batch.context_len.size
        if not 1 <= num_rows <= self.max_rows:
            raise EngineError(f"tokens: got {num_rows} rows, allowed is 1 to {self.max_rows} (max_rows)")
        check_array("tokens", batch.tokens, (num_rows,))
        check_array("positions", batch.positions, (num_rows,))
        check_array("slots", batch.slots, (num_rows,))
        check_array("context_len", batch.context_len, (num_sequences,))
        check_array("query_start", batch.query_start, (num_sequences + 1,))
        check_array("logit_rows", batch.logit_rows, (batch.logit_rows.size,))
        check_array("page_table", batch.page_table, (num_sequences, None))
        check_range("tokens", batch.tokens, 0, self.config.vocab_size - 1)
        check_range("positions", batch.positions, 0, self.config.max_context_len - 1)
        check_slots(batch.slots, self._num_pages * self._page_size)
        lengths = np.diff(batch.query_start)
        if batch.query_start[0] != 0 or batch.query_start[-1] != num_rows or lengths.min() < 0:
            raise EngineError(
                f"query_start: got {batch.query_start.tolist()}, allowed is rising from 0 to {num_rows}"
            )
        rows = batch.logit_rows
        if len(rows):
            check_range("logit_rows", rows, 0, num_rows - 1)
            if len(rows) > 1 and np.diff(rows).min() <= 0:
                raise EngineError(f"logit_rows: got {rows.tolist()}, allowed is ascending, each once")
        check_pages(batch.page_table, batch.context_len, num_pages=self._num_pages, page_size=self._page_size)
        if batch.ancestors is not None:
            _check_ancestors(batch.ancestors, batch.query_start, lengths)


def check_array(name: str, array: npt.NDArray[np.int32], shape: tuple[int | None, ...]) -> None:
    """Raise EngineError unless an int32 array is contiguous and of this shape (None = any size)."""
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype != np.int32 or not fits or not array.flags.c_contiguous:
        layout = "contiguous" if array.flags.c_contiguous else "not contiguous"
        wanted = ["any" if size is None else size for size in shape]
        raise EngineError(
            f"{name}: got {array.dtype} {list(array.shape)} {layout}, allowed is int32 {wanted} contiguous"
        )


def check_range(name: str, array: npt.NDArray[np.int32], low: int, high: int) -> None:
    """Raise EngineError unless every value is in [low, high]; no values are fine."""
    if not array.size:
        return
    smallest, largest = int(array.min()), int(array.max())
    if smallest < low or largest > high:
        raise EngineError(f"{name}: got {smallest} to {largest}, allowed is {low} to {high}")


def check_slots(slots: Int32, num_slots: int) -> None:
    """Raise EngineError unless each row is written to a slot of its own in the cache."""
    check_range("slots", slots, 0, num_slots - 1)
    different = len(set(slots.tolist()))
    if different != slots.size:
        raise EngineError(f"slots: got {slots.size} with {different} different, allowed is each once")


def check_pages(page_table: Int32, context_len: Int32, *, num_pages: int, page_size: int) -> None:
    """Raise EngineError unless the pages that hold each context exist."""
    if int(context_len.min()) < 0:
        raise EngineError(f"context_len: got {int(context_len.min())}, allowed is 0 or more")
    used = -(-context_len // page_size)
    if int(used.max()) > page_table.shape[1]:
        raise EngineError(
            f"context_len: got {int(context_len.max())}, allowed is at most {page_table.shape[1]} pages "
            f"of {page_size}"
        )
    pages = page_table[np.arange(page_table.shape[1]) < used[:, None]]
    if len(pages):
        check_range("page_table", pages, 0, num_pages - 1)


def _check_ancestors(ancestors: Int32, query_start: Int32, lengths: Int32) -> None:
    num_rows = int(query_start[-1])
    check_array("ancestors", ancestors, (num_rows, None))
    local = np.arange(num_rows) - np.repeat(query_start[:-1], lengths)
    words = ancestors.shape[1]
    if words * 32 <= int(local.max()):
        raise EngineError(
            f"ancestors: got {words} words a row, allowed is room for {int(local.max()) + 1} rows"
        )
    bits = np.unpackbits(ancestors.view(np.uint8), axis=1, bitorder="little")
    itself = bits[np.arange(num_rows), local]
    later = bits & (np.arange(words * 32) > local[:, None])
    if not itself.all() or later.any():
        row = int(np.flatnonzero((itself == 0) | later.any(axis=1))[0])
        raise EngineError(
            f"ancestors: row {row} got {np.flatnonzero(bits[row]).tolist()}, allowed is "
            f"itself ({int(local[row])}) and rows before it"
        )


def _tensor(weights: WeightSource, name: str, shape: tuple[int, ...]) -> Float32:
    array = weights.float32(name)
    if array.shape != shape:
        raise CheckpointError(f"{name}: got {list(array.shape)}, the configuration says {list(shape)}")
    return array


def _vector(weights: WeightSource, name: str, size: int) -> Float32:
    return _tensor(weights, name, (size,))


def load_decoder(
    config: DecoderConfig,
    weights: WeightSource,
    pool: Pool,
    arena: Arena,
    *,
    dtype: str,
    windows: Sequence[int | None] = (),
) -> NativeDecoder:
    """Pack the layers of a decoder: query, key and value stacked, gate and up interleaved.

    Raises:
        ConfigError: sizes that native code does not take.
        CheckpointError: a missing tensor, or one of the wrong shape.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads or dim % 2:
        raise ConfigError(
            f"executor native: got {heads} heads, {kv_heads} key heads, head_dim {dim}; "
            "allowed are whole groups of heads and an even head_dim"
        )
    shape = DecoderShape(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=config.rms_norm_eps,
        windows=[window or 0 for window in windows],
    )
    decoder = NativeDecoder(
        shape, pool, dtype=dtype, cache_dtype="float32" if dtype == "float32" else "bfloat16"
    )
    inner_padded = -(-inner // 16) * 16

    def matrix(num_outputs: int, num_inputs: int) -> Matrix:
        return Matrix(arena, pool, dtype=dtype, num_outputs=num_outputs, num_inputs=num_inputs)

    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        qkv = matrix((heads + 2 * kv_heads) * dim, hidden)
        first = 0
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows = _tensor(weights, f"{prefix}self_attn.{name}_proj.weight", (count * dim, hidden))
            qkv.pack(rows, first_row=first)
            first += count * dim
        output = matrix(hidden, heads * dim)
        output.pack(_tensor(weights, f"{prefix}self_attn.o_proj.weight", (hidden, heads * dim)))
        gate_up = matrix(2 * inner_padded, hidden)
        gate_up.pack(_tensor(weights, f"{prefix}mlp.gate_proj.weight", (inner, hidden)), kind="gate")
        gate_up.pack(_tensor(weights, f"{prefix}mlp.up_proj.weight", (inner, hidden)), kind="up")
        down = matrix(hidden, inner)
        down.pack(_tensor(weights, f"{prefix}mlp.down_proj.weight", (hidden, inner)))
        decoder.set_matrix(layer, "qkv", qkv)
        decoder.set_matrix(layer, "output", output)
        decoder.set_matrix(layer, "gate_up", gate_up)
        decoder.set_matrix(layer, "down", down)
        decoder.set_norm(layer, "input", _vector(weights, f"{prefix}input_layernorm.weight", hidden))
        decoder.set_norm(layer, "post", _vector(weights, f"{prefix}post_attention_layernorm.weight", hidden))
        if config.qk_norm:
            decoder.set_norm(layer, "q", _vector(weights, f"{prefix}self_attn.q_norm.weight", dim))
            decoder.set_norm(layer, "k", _vector(weights, f"{prefix}self_attn.k_norm.weight", dim))
    return decoder
