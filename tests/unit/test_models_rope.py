"""RoPE frequencies against independent formulas, and against transformers where it is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dspark.models.config import RopeConfig
from dspark.models.rope import inverse_frequencies
from support.tiny_models import hf_fields, tiny_config

VARIANTS = {
    "default": RopeConfig(theta=100000.0),
    "linear": RopeConfig(scaling="linear", factor=4.0),
    "llama3": RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_max_position_embeddings=8192),
    "yarn": RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn untruncated": RopeConfig(
        scaling="yarn",
        factor=4.0,
        original_max_position_embeddings=2048,
        truncate=False,
        attention_factor=1.25,
    ),
    "yarn mscale": RopeConfig(
        scaling="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.7, mscale_all_dim=1.0
    ),
    "yarn one step": RopeConfig(
        theta=1e6, scaling="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=1.0
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = VARIANTS[name]
    fields = hf_fields(tiny_config(head_dim=64, rope=rope, max_context_len=131072))
    theirs_config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=fields["rope_parameters"]
    )
    compute = ROPE_INIT_FUNCTIONS.get(rope.scaling, LlamaRotaryEmbedding.compute_default_rope_parameters)
    theirs, factor = compute(theirs_config)

    ours, our_factor = inverse_frequencies(rope, 64)

    np.testing.assert_allclose(ours, theirs.numpy(), rtol=5e-7)
    assert our_factor == pytest.approx(factor)


def test_default_frequencies_are_powers_of_theta() -> None:
    ours, factor = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    np.testing.assert_allclose(ours, [1.0, 0.1, 0.01, 0.001], rtol=2e-7)
    assert factor == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 64)
    scaled, _ = inverse_frequencies(VARIANTS["linear"], 64)
    np.testing.assert_array_equal(scaled, plain / np.float32(4))


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled, _ = inverse_frequencies(VARIANTS["llama3"], 128)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and not (short | long).all()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-7)
    between = ~(short | long)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert (np.diff(scaled) < 0).all()


def test_yarn_keeps_fast_dimensions_stretches_slow_ones_and_raises_attention() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=1e6), 128)
    scaled, factor = inverse_frequencies(VARIANTS["yarn"], 128)
    turns = 32768 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-6)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_divisors_from_gguf_divide_what_is_there() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    divided, _ = inverse_frequencies(RopeConfig(frequency_divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_array_equal(divided, plain / np.array([1, 2, 4, 8], np.float32))


def test_llama3_scaling_equals_the_divisors_llama_cpp_would_store() -> None:
    plain, _ = inverse_frequencies(RopeConfig(theta=500000.0), 64)
    scaled, _ = inverse_frequencies(VARIANTS["llama3"], 64)
    divisors = tuple(float(x) for x in (plain / scaled).astype(np.float32))
    again, _ = inverse_frequencies(RopeConfig(theta=500000.0, frequency_divisors=divisors), 64)
    np.testing.assert_allclose(again, scaled, rtol=2e-7)
