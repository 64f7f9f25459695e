"""What bench_quality tells: divergences of known distributions."""

import numpy as np
import pytest
from dspark_build.bench_quality import compare, kl_divergence


def test_kl_of_known_distributions():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    logits = (
        np.log(np.array([p, p], np.float32)),
        np.log(np.array([q, p], np.float32)) + 3,
    )  # a shift changes nothing
    assert kl_divergence(*logits) == pytest.approx([0.25 * np.log(2), 0], abs=1e-6)


def test_prompts_are_summed_by_row():
    told = compare(
        "int8", [(np.array([True]), np.array([0.3])), (np.array([True, False, True]), np.zeros(3))]
    )
    assert (told.num_rows, told.arg_max_agreement) == (4, 0.75)
    assert told.mean_kl == pytest.approx(0.075)
