"""Fit what arg-max drafts are worth: the weights of `dspark.drafters.greedy_confidence`.

The label is whether the draft is the target's arg-max, on greedy answers of the target, at slots all of whose
predecessors in the block were right: what verification will see at temperature 0. On answers that the drafter was
trained with it looks better than it is, so this belongs to `--confidence-only` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from dspark.calibration.logistic import information, logistic_weights
from dspark.calibration.sts import auc
from dspark.drafters.greedy_confidence import logit_of

from dspark_build.training_batch import pack
from dspark_build.training_data import Dataset
from dspark_build.training_model import DrafterModel

__all__ = ["GreedyFit", "GreedySlots", "fit_greedy_confidence", "fit_weights", "greedy_slots"]

Array = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

MIN_BLOCKS = 400
_EVERY = 3  # answer tokens between two anchors
_POOLED_LABELS = 100.0  # labels that the fit of all positions together is worth to one of them
_RIDGE = 1e-3
_PRIOR = np.array([0.5, 0.5, 0.0])  # both alike, and nothing added


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedySlots:
    """N blocks, teacher-forced."""

    features: Array  # [N, G, 3] confidence logit, logit q of the arg-max, 1
    hit: Bool  # [N, G] the arg-max is the target's
    known: Bool  # [N, G] all slots before it were hits, and the answer goes that far


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyFit:
    """Weights fitted to all blocks, and how well a fit to four fifths of the answers orders those of the others.

    With fewer than five answers there are no others: both measures are then of the blocks that were fitted.
    """

    weights: npt.NDArray[np.float32]  # [G, 3]
    auc_before: float  # of the confidence logit at the first position
    auc_after: float
    num_blocks: int


def fit_greedy_confidence(model: DrafterModel, data: Dataset, *, sequences: int) -> GreedyFit | None:
    """Fit to all greedy answers of `data`; None where they give fewer than `MIN_BLOCKS` blocks.

    Arguments:
        model: with a confidence head, its parameters those that are served.
        sequences: of one pass, at most.
    """
    keys = [key for key in (*data.train, *data.held_out) if data.temperature(key) == 0.0]
    parts = list(greedy_slots(model, data, keys, sequences=max(min(sequences, len(keys) // 5), 1)))
    if sum(len(part.hit) for part in parts) < MIN_BLOCKS:
        return None
    asked = [part for at, part in enumerate(parts) if at % 5 == 4]
    learnt = _joined([part for at, part in enumerate(parts) if at % 5 != 4])
    check = _joined(asked) if asked else learnt
    score = check.features[:, 0] @ fit_weights(learnt)[0]
    return GreedyFit(
        weights=fit_weights(_joined(parts)).astype(np.float32),
        auc_before=auc(check.features[:, 0, 0], check.hit[:, 0]),
        auc_after=auc(score, check.hit[:, 0]),
        num_blocks=sum(len(part.hit) for part in parts),
    )


@torch.no_grad()
def greedy_slots(
    model: DrafterModel, data: Dataset, keys: list[tuple[int, int]], *, sequences: int
) -> Iterator[GreedySlots]:
    """Yield the blocks of some answers, `sequences` answers at a time."""
    device = model.frozen.embedding.device
    for first in range(0, len(keys), sequences):
        examples = [data.example(key) for key in keys[first : first + sequences]]
        anchors = [np.arange(e.prompt_len, len(e.tokens) - 1, _EVERY, dtype=np.int64) for e in examples]
        batch = pack(examples, anchors, block_size=model.config.block_size).to(device)
        if not batch.num_blocks:
            continue
        output = model.block_pass(batch)
        assert output.confidence_logits is not None, "fitted for drafters with a confidence head"
        best, entry = (logits := model.logits(output)).max(-1)
        logit_q = logit_of((best - logits.logsumexp(-1)).cpu().numpy())
        rated = output.confidence_logits.cpu().numpy()
        hit = model.frozen.draft_to_target[entry] == batch.target_argmax[batch.target_row]
        right = torch.cumprod((hit & batch.valid).int(), 1).bool()
        before = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1)
        yield GreedySlots(
            features=np.stack([rated, logit_q, np.ones_like(rated)], -1).astype(np.float64),
            hit=hit.cpu().numpy(),
            known=(before & batch.valid).cpu().numpy(),
        )


def fit_weights(slots: GreedySlots) -> Array:
    """Return the most likely weights [G, 3]: of all positions together first, then each held to that."""
    x, hit, ridge = slots.features, slots.hit, _RIDGE * np.eye(3)
    all_x = x[slots.known]
    pooled = logistic_weights(all_x, hit[slots.known], prior=_PRIOR, precision=ridge)
    precision = _POOLED_LABELS * information(all_x, pooled) + ridge
    return np.stack(
        [
            logistic_weights(x[known, k], hit[known, k], prior=pooled, precision=precision)
            for k, known in enumerate(slots.known.T)
        ]
    )


def _joined(parts: list[GreedySlots]) -> GreedySlots:
    return GreedySlots(
        features=np.concatenate([part.features for part in parts]),
        hit=np.concatenate([part.hit for part in parts]),
        known=np.concatenate([part.known for part in parts]),
    )
