"""Logistic regression by Newton steps, held to a prior."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["information", "logistic_weights", "sigmoid"]

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

_MOST_STEPS = 30
_LONGEST_STEP = 1.0


def sigmoid(z: Float64) -> Float64:
    """Return 1 / (1 + e^-z), for any z."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * z)))


def information(x: Float64, weights: Float64) -> Float64:
    """Return what one label tells of the weights on average [m, m], for features x [n, m]; 0 without labels."""
    p = sigmoid(x @ weights)
    return np.asarray((x * (p * (1.0 - p))[:, None]).T @ x / max(len(x), 1))


def logistic_weights(
    x: Float64, hit: Bool, *, prior: Float64, precision: Float64, least: Float64 | None = None
) -> Float64:
    """Return the weights [m] of the highest posterior of P(hit) = sigmoid(x w).

    Arguments:
        x: [n, m] features.
        hit: [n].
        prior, precision: [m] and [m, m] of the Gaussian prior.
        least: [m] bounds from below, -inf = none.
    """
    w = prior
    for _ in range(_MOST_STEPS):
        gradient = x.T @ (hit - sigmoid(x @ w)) - precision @ (w - prior)
        step = np.linalg.solve(len(x) * information(x, w) + precision, gradient)
        step *= min(1.0, _LONGEST_STEP / max(float(np.abs(step).max()), 1e-12))
        w = w + step if least is None else np.maximum(w + step, least)
        if float(np.abs(step).max()) < 1e-7:
            break
    return w
