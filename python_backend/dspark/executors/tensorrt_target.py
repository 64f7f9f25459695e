"""The target engine as a `TargetExecutor`: pads a ragged batch to a bucket, runs it, cuts the padding off.

A pass that the device lays out (`scheduled`) is the same graph: its host's rows are then those of prompts alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.drafters.device_draws import DRAWS, BlockDraws
from dspark.executors.interface import Float32, Int32, StepBatch, TargetOutput, Verified
from dspark.executors.scheduled import ScheduledBatch, ScheduledPass
from dspark.executors.tensorrt_bindings import (
    CALIBRATION_SHAPE,
    DTYPE_NAMES,
    VERIFY_DEPTH,
    Precision,
    VerifyShape,
    target_bindings,
)
from dspark.executors.tensorrt_buckets import EngineShapes, Sizes, bucket, target_buckets
from dspark.executors.tensorrt_runner import Runner
from dspark.executors.tensorrt_session import KeepingSession, Session
from dspark.executors.verifying import VerifyBatch
from dspark.models.config import TargetConfig, WeightSource

__all__ = ["TensorRTTarget"]

_OUTPUTS = ("logits", "argmax", "finite")
_VERIFIED = ("accepted", "next_token", "finite")
_SCHEDULED = (*_VERIFIED, "verify_len")


class TensorRTTarget:
    """The target model on one engine.

    Arguments:
        session: runs the target's graph.
        config: the target.
        weights: read for `embedding_and_head` alone.
        precision, feature_layer_ids: those of the export.
        shapes: the largest pass.
        verify: what its graph verifies; None = it gives logits only.
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
        verify: VerifyShape | None = None,
    ) -> None:
        self.name, self.config, self.dtype = session.name, config, DTYPE_NAMES[precision]
        self.feature_layer_ids = feature_layer_ids
        self._weights, self._shapes = weights, shapes
        self._features = ("features",) if feature_layer_ids else ()
        self._verify = verify
        self.longest_chain = VERIFY_DEPTH if verify else 0
        self._block_size = verify.block_size if verify else 0
        self.reads_probs = self._block_size > 0
        self._rated = verify is not None and verify.rated
        self.schedules = self._rated and isinstance(session, KeepingSession) and session.keeps
        self._started: ScheduledBatch | None = None
        bindings = target_bindings(
            config, precision=precision, feature_layer_ids=feature_layer_ids, verify=verify
        )
        self._runner = Runner(
            session,
            bindings,
            shapes,
            more={"Q": shapes.max_sequences * self._block_size, "D": shapes.max_sequences},
        )

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes that one page takes over all layers, keys and values."""
        return self._runner.page_bytes(page_size)

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate every buffer and prepare the decoding passes.

        Raises:
            CapacityError: when the device has not that much memory.
        """
        kinds = [_OUTPUTS, _VERIFIED] if self._verify else [_OUTPUTS]
        plain = [self._with_probs(sizes) for sizes in target_buckets(self._shapes)]
        self._runner.allocate(
            num_slots=num_pages * page_size,
            buckets=plain,
            outputs=[(*kind, *self._features) for kind in kinds],
        )
        if self.schedules:
            self._runner.prepare(
                [sizes | {"D": sizes["R"]} for sizes in plain], [(*_SCHEDULED, *self._features)]
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
        found = self._run(batch, self._no_verification(batch), _OUTPUTS)
        return TargetOutput(
            logits=found["logits"],
            argmax=found["argmax"],
            finite=found["finite"] != 0,
            features=found.get("features"),
        )

    def forward_verified(self, batch: StepBatch, verify: VerifyBatch) -> TargetOutput:
        """Run one pass and verify its chains; logits never leave the device. Raises as `forward`."""
        assert self._verify is not None, "asked of what says that it verifies nothing"
        return self._without_logits(self._run(batch, verify, _VERIFIED))

    def launch_scheduled(self, batch: ScheduledBatch) -> None:
        """Start a pass whose first sequences are what the drafter, started before it, is going to draft.

        Raises:
            EngineError: a batch larger than the engine's shapes, or a device that refuses.
        """
        assert self.schedules, "asked of what says that it does not"
        feeds, padding = self._feeds(batch.rows, batch.verify)
        feeds |= {
            "anchors": batch.anchors,
            "kinds": batch.kinds,
            "calibration": batch.calibration,
            "budget": np.array([batch.budget], np.int32),
        }
        num_drafted = len(batch.anchors)
        more = num_drafted + batch.budget
        sizes = self._sizes(batch.rows, more=more)
        sizes["D"] = bucket("drafted sequences of a pass", num_drafted, self._shapes.max_sequences)
        outputs = (*_SCHEDULED, *self._features)
        self._runner.launch(feeds, sizes, outputs, padding=padding | {"kinds": -1.0})
        self._started = batch

    def collect_scheduled(self) -> ScheduledPass:
        """Wait for what was started.

        Raises:
            EngineError: the device refuses.
        """
        batch, self._started = self._started, None
        assert batch is not None, "launch_scheduled comes before"
        pass_s, num_drafted = self._runner.wait(), len(batch.anchors)
        verify_len: Int32 = self._runner.outputs({"verify_len": num_drafted})["verify_len"]
        more = num_drafted + int(verify_len.sum())
        num_sequences = len(batch.rows.context_len)
        counts = self._counts(num_sequences, len(batch.rows.tokens) + more, len(batch.rows.logit_rows) + more)
        found = self._runner.outputs({name: counts[name] for name in (*_VERIFIED, *self._features)})
        return ScheduledPass(self._without_logits(found), verify_len, pass_s)

    def _without_logits(self, found: dict[str, npt.NDArray[Any]]) -> TargetOutput:
        return TargetOutput(
            logits=np.empty((0, self.config.vocab_size), np.float32),
            argmax=np.empty(0, np.int32),
            finite=found["finite"] != 0,
            features=found.get("features"),
            verified=Verified(accepted=found["accepted"], next_token=found["next_token"]),
        )

    def _run(
        self, batch: StepBatch, verify: VerifyBatch | None, outputs: tuple[str, ...]
    ) -> dict[str, npt.NDArray[Any]]:
        feeds, padding = self._feeds(batch, verify)
        if self._rated:
            feeds |= self._nothing_drafted()
        counts = self._counts(len(batch.context_len), len(batch.tokens), len(batch.logit_rows))
        wanted = {name: counts[name] for name in (*outputs, *self._features)}
        return self._runner.run(feeds, self._sizes(batch), wanted, padding=padding)

    def _feeds(
        self, batch: StepBatch, verify: VerifyBatch | None
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, float]]:
        """Return the inputs of the rows that the host knows, and what stands behind the real ones."""
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
        if verify is not None:
            feeds |= {
                "verify_start": verify.row_start,
                "first_positions": verify.first_positions,
                "prob_rows": verify.prob_rows,
                **{name: getattr(verify.draws, name) for name in DRAWS},
            }
            padding |= {"verify_start": float(verify.row_start[-1]), "prob_rows": -1.0, "top_p": 1.0}
        return feeds, padding

    @staticmethod
    def _counts(num_sequences: int, num_rows: int, num_logits: int) -> dict[str, int]:
        """Return how many entries of every output are real."""
        return dict.fromkeys(_OUTPUTS, num_logits) | {
            "accepted": num_sequences,
            "next_token": num_sequences,
            "features": num_rows,
        }

    def _nothing_drafted(self) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a pass that the host has laid out as a whole."""
        none, (kinds, numbers) = np.zeros(0, np.int32), CALIBRATION_SHAPE
        return {
            "anchors": none,
            "kinds": none,
            "calibration": np.zeros((kinds, self._block_size, numbers), np.float32),
            "budget": np.zeros(1, np.int32),
        }

    def _no_verification(self, batch: StepBatch) -> VerifyBatch | None:
        """Return a batch whose sequences have no rows to verify, None where the graph verifies nothing."""
        if self._verify is None:
            return None
        num_sequences, num_rows = len(batch.context_len), len(batch.logit_rows)
        return VerifyBatch(
            row_start=np.zeros(num_sequences + 1, np.int32),
            first_positions=np.zeros(num_sequences, np.int32),
            prob_rows=np.full(num_rows, -1, np.int32),
            draws=BlockDraws.arg_max(num_sequences),
        )

    def _with_probs(self, sizes: Sizes) -> Sizes:
        """Return the sizes of a pass that the host has laid out."""
        return sizes | {"Q": sizes["R"] * self._block_size, "D": 0}

    def _sizes(self, batch: StepBatch, *, more: int = 0) -> Sizes:
        """Return the sizes of a pass; `more` rows, all with logits, are not in the batch."""
        shapes, num_rows, num_logits = (
            self._shapes,
            len(batch.tokens) + more,
            len(batch.logit_rows) + more,
        )
        tokens = bucket("rows of a pass", num_rows, shapes.max_tokens)
        # Where all rows are wanted the shape is one of those that were prepared.
        all_wanted = num_logits == num_rows and tokens <= shapes.max_logit_rows
        sizes = {
            "R": bucket("sequences of a pass", len(batch.context_len), shapes.max_sequences),
            "T": tokens,
            "M": tokens if all_wanted else bucket("rows of logits", num_logits, shapes.max_logit_rows),
            "P": shapes.max_pages,
            "W": 0
            if batch.ancestors is None
            else bucket("mask words", batch.ancestors.shape[1], shapes.max_words),
        }
        return self._with_probs(sizes)
