"""What an arg-max draft is worth, from the confidence head and from the drafter's own probability of it.

    z'_k = w_k0 z_k + w_k1 logit q_k(x_k) + w_k2,    logit q = log q - log(1 - q)

At temperature 0 the scheduler may look at the drafted token itself: the answer is the target's arg-max whatever is
verified. For drafts that are drawn it may not (algorithm.md, section 4): their confidence stays z_k, which knows
x_1..x_{k-1} alone. The weights [G, 3] are fitted by `dspark-build train --confidence-only`.
"""

from __future__ import annotations

import numpy as np

from dspark.executors.interface import Float32

__all__ = ["device_weights", "log_q_of_best", "logit_of", "rate_greedy"]

_LEAST_REST = 1e-4  # 1 - q counts as at least this much


def device_weights(weights: Float32 | None, block_size: int) -> Float32:
    """Return what a device rates arg-max drafts with [G, 3]: (1, 0, 0), the head's z, where none were fitted."""
    plain = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (block_size, 1))
    return plain if weights is None else weights


def log_q_of_best(logits: Float32) -> Float32:
    """Return log q of the arg-max of each row of logits [R, Vd], float32 [R]; NaN where a row is not finite."""
    top = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.exp(logits - top, dtype=np.float32).sum(axis=-1, dtype=np.float64)
        return np.asarray(-np.log(total), np.float32)


def logit_of(log_q: Float32) -> Float32:
    """Return logit q for log q of any shape."""
    log_q = np.minimum(log_q, np.float32(0.0))
    return np.asarray(log_q - np.log(np.maximum(-np.expm1(log_q), np.float32(_LEAST_REST))))


def rate_greedy(weights: Float32, confidence_logits: Float32, log_q: Float32) -> Float32:
    """Return z' [R] of one position.

    Arguments:
        weights: [3] of the position.
        confidence_logits: [R] z.
        log_q: [R] log q of the draft.
    """
    return np.asarray(weights[0] * confidence_logits + weights[1] * logit_of(log_q) + weights[2], np.float32)
