"""A target and a drafter over two tokens whose distributions and confidences are written down: executors by table.

Engine, `DSparkDrafter`, sampling and scheduling on top of them are the real ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from dspark.drafters.dspark import DSparkDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.executors.interface import BlockOutput, DraftBatch, StepBatch, TargetOutput
from dspark.models.config import DecoderConfig, DrafterConfig, RopeConfig, TargetConfig
from dspark.sampling.transforms import SampledRule
from dspark.scheduling.interface import Scheduler

__all__ = ["TableDrafter", "TableTarget", "make_table_engine"]

Float64 = npt.NDArray[np.float64]

_DECODER = DecoderConfig(
    hidden_size=2,
    intermediate_size=2,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-5,
    qk_norm=False,
    rope=RopeConfig(),
)


class TableTarget:
    """Gives every row the same distribution."""

    name, dtype = "table", "float32"
    feature_layer_ids = (0,)

    def __init__(self, probs: Float64) -> None:
        self.config = TargetConfig(
            architecture="llama",
            decoder=_DECODER,
            vocab_size=len(probs),
            tie_word_embeddings=True,
            max_context_len=512,
        )
        self._row = np.log(probs).astype(np.float32)

    def allocate_cache(self, **_sizes: int) -> None:
        return None

    def cache_page_bytes(self, page_size: int) -> int:
        return page_size

    def forward(self, batch: StepBatch) -> TargetOutput:
        count = len(batch.logit_rows)
        return TargetOutput(
            logits=np.tile(self._row, (count, 1)),
            argmax=np.full(count, int(self._row.argmax()), np.int32),
            finite=np.ones(count, np.bool_),
            features=np.zeros((len(batch.tokens), 2), np.float32),
        )


class TableDrafter:
    """Draws every draft from the same distribution; c_k [G, V] is looked up by position and previous token."""

    name = "table"
    greedy_confidence = None

    def __init__(self, probs: Float64, confidence: Float64) -> None:
        self.config = DrafterConfig(
            decoder=_DECODER,
            vocab_size=len(probs),
            block_size=len(confidence),
            target_layer_ids=(0,),
            mask_token_id=0,
            markov_rank=1,
            markov_head_type="vanilla",
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            sliding_windows=(None,),
            draft_vocab_size=len(probs),
        )
        self._row = np.log(probs).astype(np.float32)
        with np.errstate(divide="ignore"):
            logits = np.log(confidence) - np.log1p(-confidence)
        self._logits = np.clip(logits, -60.0, 60.0).astype(np.float32)

    def allocate_cache(self, **_sizes: int) -> None:
        return None

    def cache_page_bytes(self, page_size: int) -> int:
        return page_size

    def append_context(self, **_rows: object) -> None:
        return None

    def draft(self, batch: DraftBatch) -> BlockOutput:
        shape = (len(batch.anchors), self.config.block_size)
        position = np.broadcast_to(np.arange(shape[1], dtype=np.float32)[:, None], (*shape, 1))
        return BlockOutput(base_logits=np.tile(self._row, (*shape, 1)), hidden=np.repeat(position, 2, axis=2))

    def initial_state(self, _num_sequences: int) -> None:
        return None

    def head_step(self, **_inputs: object) -> tuple[None, None]:
        return None, None

    def confidence_logits(
        self, *, previous: npt.NDArray[np.int32], hidden: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        picked: npt.NDArray[np.float32] = self._logits[hidden[:, 0].astype(np.int64), previous]
        return picked


def make_table_engine(
    target: Float64,
    draft: Float64,
    confidence: Float64,
    scheduler: Scheduler,
    *,
    max_batch_size: int,
    rule: SampledRule = "block",
) -> Engine:
    """Build an engine that judges requests by one rule, whether they name a seed or not.

    Arguments:
        target, draft: [V] p and q of every position.
        confidence: [G, V] c_k given the token before it.
    """
    return Engine(
        target=TableTarget(target),  # type: ignore[arg-type]
        drafter=DSparkDrafter(TableDrafter(draft, confidence)),  # type: ignore[arg-type]
        scheduler=scheduler,
        limits=EngineLimits(
            max_batch_size=max_batch_size,
            max_context_len=512,
            max_step_tokens=4096,
            num_pages=4096,
            page_size=16,
        ),
        rule=rule,
    )
