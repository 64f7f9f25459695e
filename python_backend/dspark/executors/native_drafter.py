"""Runs a DFlash / DSpark drafter in native code: the default on CPUs. No torch.

Embedding and LM head are the native target's own panels where it is given, so they are held once. Keys and
values of a running block go to slots of their own behind the pages, and are overwritten by the next block.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from dspark_plugins.native.binding import (
    BLOCK,
    Arena,
    Matrix,
    NativeError,
    NativeHead,
    Pass,
    Pool,
    TreeCall,
    to_bfloat16,
)
from dspark_plugins.native.rope import RopeTable
from dspark_plugins.native.threads import default_num_threads

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.device_draws import BlockDraws, SampledBlock
from dspark.drafters.interface import DraftTree, GreedyBlock
from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.interface import BlockOutput, DraftBatch, Float32, Int32
from dspark.executors.native_target import (
    NativeTarget,
    check_array,
    check_dtype,
    check_pages,
    check_range,
    check_slots,
    load_decoder,
)
from dspark.models.config import WeightSource
from dspark.models.rope import inverse_frequencies
from dspark.sampling.distribution import Distribution
from dspark.sampling.transforms import scale_of

__all__ = ["NativeBlockDrafter"]

_SAMPLING = np.dtype(  # DSparkSampling of dspark_native.h
    [
        ("seed", np.int64),
        ("top_p", np.float64),
        ("scale", np.float32),
        ("min_log", np.float32),
        ("top_k", np.int32),
        ("coupled", np.int32),
        ("position", np.int32),
        ("num_committed", np.int32),
    ]
)


class NativeBlockDrafter:
    """Runs one drafter checkpoint; a `BlockDrafterExecutor` and a `GreedyBlockExecutor`."""

    name = "native"

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        *,
        dtype: str,
        target: NativeTarget | None = None,
        target_embedding: Float32 | None = None,
        target_head: Float32 | None = None,
        num_threads: int | None = None,
        max_sequences: int = 512,
    ) -> None:
        """Pack the drafter's weights.

        Arguments:
            dtype: float32, bfloat16 or int8; in int8 the feature and gate projections stay bfloat16.
            target: shares its threads, and its embedding and head where the checkpoint has none of its own.
            target_embedding, target_head: [V, d] float32, used the same way where there is no native target.
            num_threads: of an own pool, without `target`.
            max_sequences: the most blocks of one call.

        Raises:
            ConfigError: an unknown dtype, no room for the weights.
            CheckpointError: no embedding or no head anywhere.
        """
        check_dtype(dtype)
        self.config, self.dtype, self.max_sequences = checkpoint.config, dtype, max_sequences
        self._num_slots = self._page_size = self._num_pages = 0
        decoder = self.config.decoder
        self._draft_vocab_size = self.config.draft_vocab_size or self.config.vocab_size
        self._rope = RopeTable(*inverse_frequencies(decoder.rope, decoder.head_dim))
        self._scratch: Float32 = np.empty(0, np.float32)
        self._draft_to_target = checkpoint.draft_to_target
        self.greedy_confidence = checkpoint.greedy_confidence()
        self._probs = np.empty(0, np.float64)
        self._entries: Int32 = np.empty(0, np.int32)
        self._target = target
        side_dtype = "bfloat16" if dtype == "int8" else dtype
        weights = checkpoint.weights
        try:
            self.pool = target.pool if target is not None else Pool(num_threads or default_num_threads())
            self.arena = Arena()
            self._decoder = load_decoder(
                decoder, weights, self.pool, self.arena, dtype=dtype, windows=self.config.sliding_windows
            )
            self._decoder.set_norm(0, "final", weights.float32("norm.weight"))
            self._hidden_norm = np.ascontiguousarray(weights.float32("hidden_norm.weight"))
            self._fc = self._packed(weights.float32("fc.weight"), side_dtype)
            self._decoder.set_ends(
                self._embedding(checkpoint, target_embedding), self._lm_head(checkpoint, target_head)
            )
            self._head = self._load_head(checkpoint, weights, side_dtype)
        except NativeError as error:
            raise ConfigError(f"executor native: {error}") from error

    def _packed(self, array: Float32, dtype: str | None = None) -> Matrix:
        num_outputs, num_inputs = array.shape
        matrix = Matrix(
            self.arena, self.pool, dtype=dtype or self.dtype, num_outputs=num_outputs, num_inputs=num_inputs
        )
        matrix.pack(array)
        return matrix

    def _embedding(self, checkpoint: DrafterCheckpoint, given: Float32 | None) -> Matrix:
        if self._target is not None and not checkpoint.own_embedding:
            return self._target.embedding
        if given is None and not checkpoint.own_embedding:
            raise CheckpointError(
                f"{checkpoint.folder}: has no embed_tokens.weight, so the target's is needed; got none"
            )
        return self._packed(
            checkpoint.weights.float32("embed_tokens.weight")
            if given is None
            else checkpoint.embedding(given)
        )

    def _lm_head(self, checkpoint: DrafterCheckpoint, given: Float32 | None) -> Matrix:
        if self._target is not None and not checkpoint.own_head:
            head = self._target.head
            if checkpoint.draft_to_target is None:
                return head
            return self._packed(head.rows(checkpoint.draft_to_target))
        return self._packed(checkpoint.head(given))

    def _load_head(self, checkpoint: DrafterCheckpoint, weights: WeightSource, side_dtype: str) -> NativeHead:
        config = self.config
        w1: npt.NDArray[np.float32] | npt.NDArray[np.uint16] | None = None
        w2 = mix = mix_bias = confidence = None
        confidence_bias = 0.0
        if config.markov_rank:
            rows = weights.float32("markov_head.markov_w1.weight")
            w1 = np.ascontiguousarray(rows) if self.dtype == "float32" else to_bfloat16(rows)
            w2 = self._packed(weights.float32("markov_head.markov_w2.weight"))
            name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head_type)
            if name is not None:
                mix = self._packed(weights.float32(f"markov_head.{name}.weight"), side_dtype)
                mix_bias = np.ascontiguousarray(weights.float32(f"markov_head.{name}.bias"))
        if config.enable_confidence_head:
            confidence = np.ascontiguousarray(weights.float32("confidence_head.proj.weight")[0])
            confidence_bias = float(weights.float32("confidence_head.proj.bias")[0])
        return NativeHead(
            self.pool,
            kind=config.markov_head_type if config.markov_rank else "none",
            hidden_size=config.decoder.hidden_size,
            draft_vocab_size=self._draft_vocab_size,
            w1=w1,
            w2=w2,
            mix=mix,
            mix_bias=mix_bias,
            confidence=confidence,
            confidence_bias=confidence_bias,
            previous_to_row=checkpoint.previous_to_row,
            draft_to_target=checkpoint.draft_to_target,
            greedy_confidence=self.greedy_confidence,
        )

    # Caches

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, keys and values."""
        decoder = self.config.decoder
        element = 4 if self.dtype == "float32" else 2
        padded = -(-decoder.head_dim // 16) * 16
        return decoder.num_layers * page_size * decoder.num_kv_heads * (decoder.head_dim + padded) * element

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate context keys and values of every layer.

        Raises:
            CapacityError: when the machine has not that much memory.
        """
        own = self.max_sequences * self.config.block_size
        if num_pages < 1 or page_size < 1 or num_pages * page_size + own >= 2**31:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens beside {own} of running blocks: "
                "allowed are 1 to 2^31 - 1 tokens in all"
            )
        self._num_pages, self._num_slots = 0, num_pages * page_size  # the old cache is gone in any case
        try:
            self._decoder.allocate_cache(self._num_slots + own)
        except NativeError as error:
            need = num_pages * self.cache_page_bytes(page_size)
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens needs {need} bytes: {error}"
            ) from error
        self._num_pages, self._page_size = num_pages, page_size

    def append_context(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Project features [N, m*d] of committed rows and write their K/V of every layer into `slots` [N].

        Raises:
            EngineError: arrays that do not fit each other, this drafter or its cache.
        """
        num_rows = len(features)
        if not num_rows:
            return
        self._need_cache()
        width = len(self.config.target_layer_ids) * self.config.decoder.hidden_size
        if features.dtype != np.float32 or features.shape != (num_rows, width):
            raise EngineError(
                f"features: got {features.dtype} {list(features.shape)}, allowed is float32 [N, {width}]"
            )
        check_array("positions", positions, (num_rows,))
        check_array("slots", slots, (num_rows,))
        check_slots(slots, self._num_slots)
        check_range("positions", positions, 0, 2**24)
        self._rope.reach(int(positions.max()) + 1)
        self._decoder.append(
            self._fc,
            self._hidden_norm,
            np.ascontiguousarray(features),
            positions,
            slots,
            self._rope.cos,
            self._rope.sin,
        )

    # The block

    def draft(self, batch: DraftBatch) -> BlockOutput:
        """Run the block pass of every sequence.

        Raises:
            EngineError: a batch that does not fit itself, this drafter or its cache.
        """
        block_size = self.config.block_size
        logits = np.empty((len(batch.anchors), block_size, self._draft_vocab_size), np.float32)
        return BlockOutput(base_logits=logits, hidden=self._block(batch, block_size, logits))

    def draft_greedy(self, batch: DraftBatch, *, num_drafts: Int32) -> GreedyBlock:
        """Draft whole greedy blocks; `num_drafts` [R], each from 1 to G. Logits never leave this call.

        Raises:
            EngineError: a batch that does not fit itself, this drafter or its cache.
        """
        num_sequences, block_size = len(batch.anchors), self.config.block_size
        check_array("num_drafts", num_drafts, (num_sequences,))
        self._check_count(num_sequences)
        check_range("num_drafts", num_drafts, 1, block_size)
        steps = int(num_drafts.max())
        logits = self._scratch_logits(num_sequences, steps)
        hidden = self._block(batch, steps, logits)
        found, finite, rated = self._head.greedy(
            batch.anchors, hidden, logits, with_confidence=self.config.enable_confidence_head
        )
        if rated is not None:
            finite &= np.isfinite(rated)
        num_finite = np.where(finite.all(axis=1), steps, finite.argmin(axis=1))
        tokens = np.zeros((num_sequences, block_size), np.int32)
        tokens[:, :steps] = found
        confidence = None
        if rated is not None:
            confidence = np.zeros((num_sequences, block_size), np.float32)
            confidence[:, :steps] = rated
        return GreedyBlock(
            tokens=tokens,
            num_tokens=np.minimum(num_finite, num_drafts).astype(np.int32),
            confidence_logits=confidence,
        )

    @property
    def makes_trees(self) -> bool:
        """Whether the last token of a path is all that its sequential head knows of it."""
        return self._head.makes_trees

    def draft_tree(self, batch: DraftBatch, *, num_nodes: Int32, width: int, branch: int) -> DraftTree:
        """Grow a tree of up to `num_nodes` [R] nodes out of one block of each sequence.

        Arguments:
            width: paths that are continued at each level.
            branch: children of each of them that are looked at, at most 16.

        Raises:
            EngineError: a batch that does not fit itself, this drafter or its cache.
        """
        num_sequences = len(batch.anchors)
        check_array("num_nodes", num_nodes, (num_sequences,))
        self._check_count(num_sequences)
        check_range("num_nodes", num_nodes, 1, 2**16)
        if not (1 <= width <= 64 and 1 <= branch <= 16):
            raise EngineError(f"width, branch: got {width}, {branch}, allowed are 1 to 64 and 1 to 16")
        most = int(num_nodes.max())
        steps = min(self.config.block_size, most)
        logits = self._scratch_logits(num_sequences, steps)
        hidden = self._block(batch, steps, logits)
        tokens, parents, depths, ranks = np.zeros((4, num_sequences, most), np.int32)
        log_q = np.zeros((num_sequences, most), np.float32)
        rating = np.zeros((num_sequences, most), np.float32) if self.config.enable_confidence_head else None
        count = np.zeros(num_sequences, np.int32)
        self._head.tree(
            TreeCall(
                num_sequences=num_sequences,
                steps=steps,
                width=width,
                branch=branch,
                max_nodes=most,
                anchors=batch.anchors.ctypes.data,
                hidden=hidden.ctypes.data,
                logits=logits.ctypes.data,
                tokens=tokens.ctypes.data,
                parents=parents.ctypes.data,
                depths=depths.ctypes.data,
                ranks=ranks.ctypes.data,
                log_q=log_q.ctypes.data,
                rating=None if rating is None else rating.ctypes.data,
                num_nodes=count.ctypes.data,
            )
        )
        return DraftTree(
            tokens=tokens,
            parents=parents,
            depths=depths,
            ranks=ranks,
            log_q=log_q,
            rating=rating,
            num_nodes=np.minimum(count, num_nodes).astype(np.int32),
        )

    def _scratch_logits(self, num_sequences: int, steps: int) -> Float32:
        """Return memory for logits [R, steps, Vd] that the next call may take again."""
        shape = (num_sequences, steps, self._draft_vocab_size)
        size = num_sequences * steps * self._draft_vocab_size
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.float32)
        return self._scratch[:size].reshape(shape)

    def draft_sampled(self, batch: DraftBatch, *, num_drafts: Int32, draws: BlockDraws) -> SampledBlock:
        """Draft and draw whole blocks; `num_drafts` [R], each from 1 to G. q is float64, of the tokens that were kept.

        Raises:
            EngineError: a batch that does not fit itself, this drafter or its cache.
        """
        num_sequences, block_size, vocab = len(batch.anchors), self.config.block_size, self._draft_vocab_size
        check_array("num_drafts", num_drafts, (num_sequences,))
        self._check_count(num_sequences)
        check_range("num_drafts", num_drafts, 1, block_size)
        steps = int(num_drafts.max())
        size, shape = num_sequences * steps * vocab, (num_sequences, steps, vocab)
        if self._probs.size < size:
            self._probs, self._entries = np.empty(size), np.empty(size, np.int32)
        probs, entries = self._probs[:size].reshape(shape), self._entries[:size].reshape(shape)
        logits = self._scratch_logits(num_sequences, steps)
        hidden = self._block(batch, steps, logits)
        found, finite, rated, kept = self._head.sample(
            batch.anchors,
            hidden,
            logits,
            _samplings(draws, batch.anchor_positions),
            probs,
            entries,
            with_confidence=self.config.enable_confidence_head,
        )
        if rated is not None:
            finite &= np.isfinite(rated)
        num_finite = np.where(finite.all(axis=1), steps, finite.argmin(axis=1))
        num_tokens = np.minimum(num_finite, num_drafts).astype(np.int32)
        room = ((0, 0), (0, block_size - steps))
        return SampledBlock(
            tokens=np.pad(found, room),
            num_tokens=num_tokens,
            draft_probs=None,
            confidence_logits=None if rated is None else np.pad(rated, room),
            distributions=tuple(
                tuple(
                    self._distribution(probs[i, k], entries[i, k], int(kept[i, k]))
                    for k in range(num_tokens[i])
                )
                for i in range(num_sequences)
            ),
        )

    def _distribution(
        self, probs: npt.NDArray[np.float64], entries: Int32, count: int
    ) -> Distribution | None:
        """Return a copy of q of one draft, None for an arg-max."""
        if not count:
            return None
        if count == self._draft_vocab_size:
            return Distribution(self._draft_to_target, probs.copy())
        ids = (
            entries[:count].copy()
            if self._draft_to_target is None
            else self._draft_to_target[entries[:count]]
        )
        return Distribution(ids, probs[:count].copy())

    def _block(self, batch: DraftBatch, steps: int, logits: Float32) -> Float32:
        """Fill logits [R, steps, Vd] with U_k and return h_k [R, steps, d]."""
        self._check(batch)
        config, block_size = self.config, self.config.block_size
        num_sequences, hidden_size = len(batch.anchors), config.decoder.hidden_size
        num_rows = num_sequences * block_size
        tokens = np.full((num_sequences, block_size), config.mask_token_id, np.int32)
        tokens[:, 0] = batch.anchors
        positions = (batch.anchor_positions[:, None] + np.arange(block_size, dtype=np.int32)).astype(np.int32)
        self._rope.reach(int(positions.max()) + 1)
        query_start = np.arange(0, num_rows + 1, block_size, dtype=np.int32)
        slots = np.arange(self._num_slots, self._num_slots + num_rows, dtype=np.int32)
        rows = np.arange(num_rows, dtype=np.int32).reshape(num_sequences, block_size)
        picked = np.ascontiguousarray(rows[:, :steps])
        hidden = np.empty((num_sequences, steps, hidden_size), np.float32)
        self._decoder.forward(
            Pass(
                num_rows=num_rows,
                num_sequences=num_sequences,
                max_pages=batch.page_table.shape[1],
                page_size=self._page_size,
                visibility=BLOCK,
                num_logit_rows=picked.size,
                logits_width=self._draft_vocab_size,
                tokens=tokens.ctypes.data,
                positions=positions.ctypes.data,
                query_start=query_start.ctypes.data,
                context_len=batch.context_len.ctypes.data,
                page_table=batch.page_table.ctypes.data,
                slots=slots.ctypes.data,
                logit_rows=picked.ctypes.data,
                cos=self._rope.cos.ctypes.data,
                sin=self._rope.sin.ctypes.data,
                hidden=hidden.ctypes.data,
                logits=logits.ctypes.data,
            )
        )
        return hidden

    def _need_cache(self) -> None:
        if not self._num_pages:
            raise EngineError("the drafter's cache: allocate_cache comes before the first call")

    def _check_count(self, num_sequences: int) -> None:
        if not 1 <= num_sequences <= self.max_sequences:
            raise EngineError(
                f"anchors: got {num_sequences} blocks, allowed is 1 to {self.max_sequences} (max_sequences)"
            )

    def _check(self, batch: DraftBatch) -> None:
        self._need_cache()
        num_sequences = len(batch.anchors)
        self._check_count(num_sequences)
        check_array("anchors", batch.anchors, (num_sequences,))
        check_array("anchor_positions", batch.anchor_positions, (num_sequences,))
        check_array("context_len", batch.context_len, (num_sequences,))
        check_array("page_table", batch.page_table, (num_sequences, None))
        check_range("anchors", batch.anchors, 0, self.config.vocab_size - 1)
        check_range("anchor_positions", batch.anchor_positions, 0, 2**24)
        check_pages(batch.page_table, batch.context_len, num_pages=self._num_pages, page_size=self._page_size)

    # Heads

    def initial_state(self, num_sequences: int) -> Float32 | None:
        """Return s_0 [R, r] = 0 of the RNN head, None for the others."""
        if self.config.markov_rank and self.config.markov_head_type == "rnn":
            return np.zeros((num_sequences, self.config.markov_rank), np.float32)
        return None

    def head_step(
        self, *, previous: Int32, hidden: Float32, state: Float32 | None
    ) -> tuple[Float32 | None, Float32 | None]:
        """Return B_k [R, Vd] (None at rank 0) and the next state [R, r] (None unless RNN).

        Raises:
            EngineError: arrays that do not fit each other or this drafter.
        """
        if not self.config.markov_rank:
            return None, None
        previous, hidden = self._head_input(previous, hidden)
        after = None
        if self.config.markov_head_type == "rnn":
            wanted = (len(previous), self.config.markov_rank)
            if state is None or state.dtype != np.float32 or state.shape != wanted:
                given = None if state is None else list(state.shape)
                raise EngineError(f"state: got {given}, allowed is float32 {list(wanted)}")
            after = np.array(state, order="C")
        return self._head.step(previous, hidden, after), after

    def confidence_logits(self, *, previous: Int32, hidden: Float32) -> Float32 | None:
        """Return the logits of c_k [R], None without a confidence head.

        Raises:
            EngineError: arrays that do not fit each other or this drafter.
        """
        if not self.config.enable_confidence_head:
            return None
        return self._head.confidence(*self._head_input(previous, hidden))

    def _head_input(self, previous: Int32, hidden: Float32) -> tuple[Int32, Float32]:
        check_array("previous", previous, (len(previous),))
        if len(previous):
            check_range("previous", previous, 0, self.config.vocab_size - 1)
        wanted = (len(previous), self.config.decoder.hidden_size)
        if hidden.dtype != np.float32 or hidden.shape != wanted:
            raise EngineError(
                f"hidden: got {hidden.dtype} {list(hidden.shape)}, allowed is float32 {list(wanted)}"
            )
        return previous, np.ascontiguousarray(hidden)


def _samplings(draws: BlockDraws, anchor_positions: Int32) -> npt.NDArray[np.void]:
    """Return [R] of _SAMPLING."""
    samplings = np.empty(len(anchor_positions), _SAMPLING)
    params = draws.params
    samplings["seed"] = draws.seeds
    samplings["top_p"] = [p.top_p for p in params]
    samplings["scale"] = [0.0 if p.greedy else scale_of(p.temperature) for p in params]
    samplings["min_log"] = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    samplings["top_k"], samplings["coupled"] = draws.top_k, draws.coupled
    samplings["position"] = samplings["num_committed"] = anchor_positions + 1
    return samplings
