"""Inverse frequencies of rotary embeddings, with the scalings Hugging Face transformers knows by these names.

Numpy only, so that every executor starts from the same numbers. Exponents and divisions are float32, as
there; only the power itself is taken in float64 and rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dspark.models.config import RopeConfig

__all__ = ["inverse_frequencies"]

_TWO_PI = 2.0 * math.pi


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[npt.NDArray[np.float32], float]:
    """Return the inverse frequencies [head_dim / 2] and the factor that multiplies both cos and sin.

    The angle of pair j at position p is p * frequencies[j]; pair j is elements j and j + head_dim / 2 of a
    head.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)  # over 2 pi
    frequencies = np.float32(1.0) / wavelengths
    attention_factor = 1.0
    if rope.scaling == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.scaling == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.scaling == "yarn":
        frequencies = _yarn(rope, wavelengths, head_dim)
        attention_factor = _yarn_attention_factor(rope)
    if rope.frequency_divisors:
        frequencies = frequencies / np.asarray(rope.frequency_divisors, np.float32)
    return np.ascontiguousarray(frequencies, np.float32), attention_factor


def _llama3(rope: RopeConfig, frequencies: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Divide low frequencies by `factor`, leave high ones, blend linearly in between (Llama 3.1)."""
    f32 = np.float32
    context = rope.original_max_position_embeddings
    wavelength = f32(_TWO_PI) / frequencies
    blend = (f32(context) / wavelength - f32(rope.low_freq_factor)) / f32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (f32(1) - blend) * frequencies / f32(rope.factor) + blend * frequencies
    scaled = np.where(wavelength > context / rope.low_freq_factor, frequencies / f32(rope.factor), blended)
    return np.where(wavelength < context / rope.high_freq_factor, frequencies, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, wavelengths: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Interpolate dimensions that turn less than `beta_slow` times over the original context, keep those that
    turn more than `beta_fast` times, ramp between (arXiv 2309.00071, section 3.2)."""

    def dimension_turning(times: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (times * _TWO_PI)) / (2.0 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    keep = np.float32(1) - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return (interpolated * (np.float32(1) - keep) + (np.float32(1) / wavelengths) * keep).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
