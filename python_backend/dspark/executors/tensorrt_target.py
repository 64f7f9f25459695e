"""The target engine as a `TargetExecutor`: pads a ragged batch to a bucket, runs it, cuts the padding off."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.executors.interface import Float32, StepBatch, TargetOutput
from dspark.executors.tensorrt_bindings import DTYPE_NAMES, Precision, target_bindings
from dspark.executors.tensorrt_buckets import EngineShapes, Sizes, bucket, target_buckets
from dspark.executors.tensorrt_runner import Runner
from dspark.executors.tensorrt_session import Session
from dspark.models.config import TargetConfig, WeightSource

__all__ = ["TensorRTTarget"]

_OUTPUTS = ("logits", "argmax", "finite")


class TensorRTTarget:
    """The target model on one engine.

    Arguments:
        session: runs the target's graph.
        config: the target.
        weights: read for `embedding_and_head` alone.
        precision, feature_layer_ids: those of the export.
        shapes: the largest pass.
    """

    def __init__(
        self,
        session: Session,
        config: TargetConfig,
        weights: WeightSource,
        *,
        precision: Precision,
        feature_layer_ids: tuple[int, ...],
        shapes: EngineShapes,
    ) -> None:
        self.name, self.config, self.dtype = session.name, config, DTYPE_NAMES[precision]
        self.feature_layer_ids = feature_layer_ids
        self._weights, self._shapes = weights, shapes
        self._outputs = (*_OUTPUTS, *(("features",) if feature_layer_ids else ()))
        bindings = target_bindings(config, precision=precision, feature_layer_ids=feature_layer_ids)
        self._runner = Runner(session, bindings, shapes)

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes that one page takes over all layers, keys and values."""
        return self._runner.page_bytes(page_size)

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate every buffer and prepare the decoding passes.

        Raises:
            CapacityError: when the device has not that much memory.
        """
        self._runner.allocate(
            num_slots=num_pages * page_size, buckets=target_buckets(self._shapes), outputs=[self._outputs]
        )

    def embedding_and_head(self) -> tuple[Float32, Float32]:
        """Return the input embedding [V, d] and the LM head [V, d] in float32 (the same array when tied)."""
        embedding = self._weights.float32("embed_tokens.weight")
        if self.config.tie_word_embeddings:
            return embedding, embedding
        return embedding, self._weights.float32("lm_head.weight")

    def forward(self, batch: StepBatch) -> TargetOutput:
        """Run one pass.

        Raises:
            EngineError: a batch larger than the engine's shapes, or a device that refuses.
        """
        masks = batch.ancestors
        feeds: dict[str, npt.NDArray[Any]] = {
            "tokens": batch.tokens,
            "positions": batch.positions,
            "query_start": batch.query_start,
            "context_len": batch.context_len,
            "page_table": batch.page_table,
            "slots": batch.slots,
            "ancestors": np.zeros((len(batch.tokens), 0), np.int32) if masks is None else masks,
            "logit_rows": batch.logit_rows,
        }
        # Sequences of padding have no rows: they start where the last one ends. Rows of padding belong to none.
        padding = {"query_start": float(batch.query_start[-1]), "page_table": -1.0}
        counts = dict.fromkeys(_OUTPUTS, len(batch.logit_rows)) | {"features": len(batch.tokens)}
        wanted = {name: counts[name] for name in self._outputs}
        found = self._runner.run(feeds, self._sizes(batch), wanted, padding=padding)
        return TargetOutput(
            logits=found["logits"],
            argmax=found["argmax"],
            finite=found["finite"] != 0,
            features=found.get("features"),
        )

    def _sizes(self, batch: StepBatch) -> Sizes:
        shapes, num_rows, num_logits = self._shapes, len(batch.tokens), len(batch.logit_rows)
        tokens = bucket("rows of a pass", num_rows, shapes.max_tokens)
        # Where all rows are wanted the shape is one of those that were prepared.
        all_wanted = num_logits == num_rows and tokens <= shapes.max_logit_rows
        return {
            "R": bucket("sequences of a pass", len(batch.context_len), shapes.max_sequences),
            "T": tokens,
            "M": tokens if all_wanted else bucket("rows of logits", num_logits, shapes.max_logit_rows),
            "P": shapes.max_pages,
            "W": 0
            if batch.ancestors is None
            else bucket("mask words", batch.ancestors.shape[1], shapes.max_words),
        }
