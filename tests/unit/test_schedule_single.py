"""The choices among few drafts without arrays are those with arrays."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.scheduling.allocation import (
    early_stop_num,
    lookahead_num,
    rank_candidates,
    throughput,
    verify_len_of,
)
from dspark.scheduling.planning import MARGIN, plan_drafting
from dspark.scheduling.single import (
    drafting_gain,
    early_stop_len,
    lookahead_len,
    lookahead_lens,
    plan_few,
    rates_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

confidences = st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=9)
growths = st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5]), min_size=9, max_size=9)


def seconds_of(growth: list[float]) -> np.ndarray:
    return 0.7 + np.concatenate([[0.0], np.cumsum(growth)])


@settings(max_examples=300, deadline=None)
@given(confidence=confidences, growth=growths, decay=st.floats(0.0, 1.0), max_ahead=st.integers(1, 9))
def test_early_stop_and_look_ahead(
    confidence: list[float], growth: list[float], decay: float, max_ahead: int
) -> None:
    survival = np.cumprod(np.asarray(confidence, np.float64))
    seconds = seconds_of(growth)[: len(confidence) + 1]
    candidates = rank_candidates(survival[None])
    theta = throughput(candidates, num_sequences=1, seconds=seconds)
    rates = rates_of(survival.tolist(), seconds.tolist())
    assert np.allclose(rates, theta, rtol=1e-12, atol=0.0)
    assert early_stop_len(theta.tolist()) == early_stop_num(theta)
    expected = lookahead_num(
        candidates, theta, num_sequences=1, seconds=seconds, decay=decay, max_ahead=max_ahead
    )
    alive = candidates.survival.tolist()
    got = lookahead_len(alive, seconds.tolist(), decay=decay, max_ahead=max_ahead)
    assert got == expected or near_a_tie(theta, alive, seconds, decay)


def near_a_tie(theta: np.ndarray, survival: list[float], seconds: np.ndarray, decay: float) -> bool:
    """Whether some hope equals what is at hand up to rounding: then both answers are right."""
    for stop in range(len(survival)):
        tokens, hoped = theta[stop] * seconds[stop], survival[stop]
        for ahead in range(stop + 1, len(seconds)):
            tokens += hoped
            hoped *= decay
            if abs(tokens / seconds[ahead] / theta[stop] - 1.0) < 1e-9:
                return True
    return False


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.lists(st.lists(st.floats(0.0, 1.0, width=32), min_size=3, max_size=3), min_size=2, max_size=4),
    growth=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5]), min_size=12, max_size=12),
    decay=st.floats(0.0, 1.0),
)
def test_early_stop_and_look_ahead_over_some_sequences(
    blocks: list[list[float]], growth: list[float], decay: float
) -> None:
    num = len(blocks)
    candidates = rank_candidates(np.cumprod(np.asarray(blocks, np.float64), axis=1))
    seconds = seconds_of(growth)[: 3 * num + 1]
    theta = throughput(candidates, num_sequences=num, seconds=seconds)
    alive = candidates.survival.tolist()
    rates = rates_of(alive, seconds.tolist(), num_sequences=num)
    assert np.allclose(rates, theta, rtol=1e-12, atol=0.0)
    expected = lookahead_num(
        candidates, theta, num_sequences=num, seconds=seconds, decay=decay, max_ahead=max(3, num)
    )
    root = decay ** (1.0 / num)
    ahead = {"decay": root, "max_ahead": max(3, num)}
    got = lookahead_len(alive, seconds.tolist(), num_sequences=num, **ahead)  # type: ignore[arg-type]
    assert got == expected or near_a_tie(theta, alive, seconds, root)
    survival = np.cumprod(np.asarray(blocks, np.float64), axis=1).tolist()
    lens = lookahead_lens(survival, seconds.tolist(), num_sizes=len(seconds), **ahead)  # type: ignore[arg-type]
    assert lens == verify_len_of(candidates, got, num_sequences=num).tolist()


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.lists(st.floats(0.0, 1.0, width=32), min_size=5, max_size=5), min_size=1, max_size=4),
    growth=growths,
    draft_s=st.floats(0.0, 1.0),
    early_stop=st.booleans(),
)
def test_whether_a_block_is_worth_drafting(
    blocks: list[list[float]], growth: list[float], draft_s: float, early_stop: bool
) -> None:
    samples = np.cumprod(np.asarray(blocks, np.float64), axis=1)[:, None]  # [S, 1, G]
    verify_s = seconds_of(growth)[:6]
    chosen, promise = plan_drafting(
        samples,
        np.ones(1, np.bool_),
        num_sequences=1,
        verify_s=verify_s,
        draft_s=np.array([draft_s]),
        early_stop=early_stop,
    )
    gain = drafting_gain(
        samples[:, 0].tolist(), verify_s=verify_s.tolist(), draft_s=draft_s, early_stop=early_stop
    )
    if abs(gain / MARGIN - 1.0) > 1e-6:  # arrays sum in float32
        assert chosen[0] == (gain > MARGIN)
    assert promise == (pytest.approx(gain, rel=1e-6) if chosen[0] else 1.0)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num=st.integers(1, 4), steps=st.sampled_from([1, 2, 8]), early_stop=st.booleans())
def test_who_is_worth_drafting(data: st.DataObject, num: int, steps: int, early_stop: bool) -> None:
    shape = (steps, num, 3)
    flat = data.draw(st.lists(st.integers(0, 20), min_size=steps * num * 3, max_size=steps * num * 3))
    samples = np.cumprod(np.array(flat).reshape(shape) / 20.0, axis=2)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    growth = data.draw(st.lists(st.sampled_from([0.013, 0.021, 0.11, 0.47]), min_size=12, max_size=12))
    draft_s = np.cumsum(
        data.draw(st.lists(st.sampled_from([0.017, 0.053, 0.19]), min_size=num, max_size=num))
    )
    verify_s = seconds_of(growth)[: 3 * num + 1]
    chosen, promise = plan_drafting(
        samples,
        eligible,
        num_sequences=num,
        verify_s=verify_s,
        draft_s=draft_s,
        early_stop=early_stop,
    )
    got, gain = plan_few(
        samples.transpose(1, 0, 2).tolist(),
        eligible.tolist(),
        verify_s=verify_s.tolist(),
        draft_s=draft_s.tolist(),
        early_stop=early_stop,
        margin=MARGIN,
    )
    assert got == chosen.tolist()
    assert gain == pytest.approx(promise, rel=1e-6)
