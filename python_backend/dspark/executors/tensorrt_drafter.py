"""The drafter engine as a `BlockDrafterExecutor` and `GreedyBlockExecutor`.

One call of the engine writes the context of new rows and drafts; so rows that were observed wait for the next block,
and only more of them than a call takes are written by themselves.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.device_draws import DRAWS, BlockDraws, KeptProbs, SampledBlock
from dspark.drafters.interface import GreedyBlock
from dspark.executors.interface import BlockOutput, DraftBatch, Float32, Int32
from dspark.executors.scheduled import StartedBlock
from dspark.executors.tensorrt_bindings import KEPT, Precision, drafter_bindings
from dspark.executors.tensorrt_buckets import EngineShapes, Sizes, bucket, drafter_buckets
from dspark.executors.tensorrt_head import HostHead
from dspark.executors.tensorrt_runner import Runner
from dspark.executors.tensorrt_session import Session

__all__ = ["TensorRTBlockDrafter"]

_PADDING = {"new_slots": -1.0, "page_table": -1.0, "top_p": 1.0}
_GREEDY = ("draft_tokens", "num_tokens", "confidence_logits")
_SAMPLED = (*_GREEDY, "draft_probs")
_BLOCK = ("base_logits", "hidden")


class TensorRTBlockDrafter:
    """One drafter checkpoint on one engine.

    Arguments:
        session: runs the drafter's graph.
        checkpoint: the drafter; its heads are read for requests whose drafts the host draws.
        precision: that of the export.
        shapes: the largest call.
    """

    def __init__(
        self,
        session: Session,
        checkpoint: DrafterCheckpoint,
        *,
        precision: Precision,
        shapes: EngineShapes,
    ) -> None:
        self.name, self.config, self._shapes = session.name, checkpoint.config, shapes
        bindings = drafter_bindings(self.config, precision=precision, shared=())
        self._runner = Runner(session, bindings, shapes)
        self._head = HostHead(checkpoint)
        self.greedy_confidence = checkpoint.greedy_confidence()  # the device has it in its own call
        self._width = len(self.config.target_layer_ids) * self.config.decoder.hidden_size
        self._waiting = _Rows.none(self._width)
        self._kept: weakref.ref[KeptProbs] | None = None
        self._num_started = 0  # blocks of the call that was started
        self.launches = self._runner.keeps

    # Caches

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, keys and values."""
        return self._runner.page_bytes(page_size)

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate every buffer and prepare the drafting calls.

        Raises:
            CapacityError: when the device has not that much memory.
        """
        self._runner.allocate(
            num_slots=num_pages * page_size,
            buckets=drafter_buckets(self._shapes, self.config.block_size),
            outputs=[_GREEDY] if self._runner.keeps else [_GREEDY, _SAMPLED],
        )

    def append_context(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Take features [N, m*d] of rows whose keys and values belong into `slots` [N]; written before any draft."""
        self._waiting = self._waiting.followed_by(_Rows(features, positions, slots))
        while len(self._waiting.slots) > self._shapes.max_new_rows:
            self._run(_no_block(self._shapes.max_pages), np.zeros(0, np.int32), (), BlockDraws.arg_max(0))

    # The block

    def draft(self, batch: DraftBatch) -> BlockOutput:
        """Run the block pass of every sequence."""
        num_sequences = len(batch.anchors)
        found = self._run(batch, np.zeros(num_sequences, np.int32), _BLOCK, BlockDraws.arg_max(num_sequences))
        return BlockOutput(base_logits=found["base_logits"], hidden=found["hidden"])

    def draft_greedy(self, batch: DraftBatch, *, num_drafts: Int32) -> GreedyBlock:
        """Draft whole greedy blocks; `num_drafts` [R], each at least 1. Logits never leave the device."""
        found = self._run(batch, num_drafts, _GREEDY, BlockDraws.arg_max(len(batch.anchors)))
        return GreedyBlock(
            tokens=found["draft_tokens"],
            num_tokens=found["num_tokens"],
            confidence_logits=self._rated(found),
        )

    def draft_sampled(self, batch: DraftBatch, *, num_drafts: Int32, draws: BlockDraws) -> SampledBlock:
        """Draft whole blocks, drawn on the device with the requests' own noise; `num_drafts` [R], each at least 1."""
        found = self._run(batch, num_drafts, _GREEDY if self._runner.keeps else _SAMPLED, draws)
        return self._drawn(found, len(batch.anchors))

    def launch(self, batch: DraftBatch, *, num_drafts: Int32, draws: BlockDraws) -> None:
        """Start what `draft_sampled` does; `num_drafts` [R] may be 0."""
        assert self.launches, "asked of what runs alone"
        feeds, sizes, waiting = self._call(batch, num_drafts, draws)
        self._num_started = len(batch.anchors)
        self._runner.launch(feeds, sizes, _GREEDY, padding=_PADDING)
        self._waiting = waiting

    def collect(self) -> StartedBlock:
        """Wait for what was started."""
        draft_s = self._runner.wait()
        found = self._runner.outputs(dict.fromkeys(_GREEDY, self._num_started))
        return StartedBlock(self._drawn(found, self._num_started), draft_s)

    def _drawn(self, found: dict[str, npt.NDArray[Any]], num_sequences: int) -> SampledBlock:
        return SampledBlock(
            tokens=found["draft_tokens"],
            num_tokens=found["num_tokens"],
            draft_probs=self._keep(num_sequences) if self._runner.keeps else found["draft_probs"],
            confidence_logits=self._rated(found),
        )

    def _keep(self, num_sequences: int) -> KeptProbs:
        """Return what the last call left on the device; the next one brings it here where it is still wanted."""
        kept = KeptProbs(lambda: self._runner.kept(KEPT, num_sequences), block_size=self.config.block_size)
        self._kept = weakref.ref(kept)
        return kept

    def _rated(self, found: dict[str, npt.NDArray[Any]]) -> Float32 | None:
        return found["confidence_logits"] if self.config.enable_confidence_head else None

    def _run(
        self, batch: DraftBatch, num_drafts: Int32, outputs: tuple[str, ...], draws: BlockDraws
    ) -> dict[str, npt.NDArray[Any]]:
        """Write the rows that wait and draft; return outputs of the real sequences."""
        feeds, sizes, waiting = self._call(batch, num_drafts, draws)
        found = self._runner.run(feeds, sizes, dict.fromkeys(outputs, len(batch.anchors)), padding=_PADDING)
        self._waiting = waiting
        return found

    def _call(
        self, batch: DraftBatch, num_drafts: Int32, draws: BlockDraws
    ) -> tuple[dict[str, npt.NDArray[Any]], Sizes, _Rows]:
        """Return inputs and sizes of a call, rows that wait among them, and the rows that wait once it has run."""
        shapes, num_sequences = self._shapes, len(batch.anchors)
        wanted = self._kept() if self._kept else None
        if wanted is not None:
            wanted.host()  # before this call writes over it
        self._kept = None
        new, waiting = self._waiting.cut(shapes.max_new_rows)
        feeds: dict[str, npt.NDArray[Any]] = {
            "features": new.features,
            "new_positions": new.positions,
            "new_slots": new.slots,
            "anchors": batch.anchors,
            "anchor_positions": batch.anchor_positions,
            "context_len": batch.context_len,
            "page_table": batch.page_table,
            "num_drafts": num_drafts,
            **{name: getattr(draws, name) for name in DRAWS},
        }
        sizes = {
            "R": bucket("sequences of a call", num_sequences, shapes.max_sequences),
            "N": bucket("new context rows", len(new.slots), shapes.max_new_rows),
            "P": shapes.max_pages,
        }
        return feeds, sizes, waiting

    # Heads

    def initial_state(self, num_sequences: int) -> Float32 | None:
        """Return s_0 [R, r] of the RNN head, None for the others."""
        return self._head.initial_state(num_sequences)

    def head_step(
        self, *, previous: Int32, hidden: Float32, state: Float32 | None
    ) -> tuple[Float32 | None, Float32 | None]:
        """Return B_k [R, Vd] (None at rank 0) and the next state [R, r] (None unless RNN)."""
        return self._head.step(previous=previous, hidden=hidden, state=state)

    def confidence_logits(self, *, previous: Int32, hidden: Float32) -> Float32 | None:
        """Return the logits of c_k [R], None without a confidence head."""
        return self._head.confidence(previous=previous, hidden=hidden)


class _Rows:
    """Context rows that wait: features [N, m*d], positions [N], slots [N] without two alike."""

    def __init__(self, features: Float32, positions: Int32, slots: Int32) -> None:
        self.features, self.positions, self.slots = features, positions, slots

    @classmethod
    def none(cls, width: int) -> _Rows:
        return cls(np.empty((0, width), np.float32), np.empty(0, np.int32), np.empty(0, np.int32))

    def followed_by(self, later: _Rows) -> _Rows:
        """Return both; of two rows for one slot the later one, since a page may have changed hands meanwhile."""
        slots = np.concatenate([self.slots, later.slots])
        _, last = np.unique(slots[::-1], return_index=True)
        kept = np.sort(len(slots) - 1 - last)
        return _Rows(
            np.concatenate([self.features, later.features])[kept],
            np.concatenate([self.positions, later.positions])[kept],
            slots[kept],
        )

    def cut(self, count: int) -> tuple[_Rows, _Rows]:
        """Return the first rows and those that wait on."""
        first, rest = slice(count), slice(count, None)
        return (
            _Rows(self.features[first], self.positions[first], self.slots[first]),
            _Rows(self.features[rest], self.positions[rest], self.slots[rest]),
        )


def _no_block(max_pages: int) -> DraftBatch:
    none = np.empty(0, np.int32)
    return DraftBatch(
        anchors=none,
        anchor_positions=none,
        context_len=none,
        page_table=np.empty((0, max_pages), np.int32),
    )
