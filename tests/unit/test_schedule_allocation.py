"""Where to stop: laws 3 and 4 of algorithm.md, section 6, by exact enumeration and as properties."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from dspark.scheduling.allocation import (
    best_num,
    early_stop_num,
    lookahead_num,
    rank_candidates,
    survival_of,
    throughput,
    verify_len_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Rule = Callable[[Float64, Float64], Int32]


def prefix(confidence: Float64, seconds: Float64) -> Int32:
    return _choose(confidence, seconds, "prefix")


def lookahead(confidence: Float64, seconds: Float64) -> Int32:
    return _choose(confidence, seconds, "lookahead")


def full_search(confidence: Float64, seconds: Float64) -> Int32:
    return _choose(confidence, seconds, "full")


def _choose(confidence: Float64, seconds: Float64, rule: str, num_drafts: Int32 | None = None) -> Int32:
    num_sequences, block_size = confidence.shape
    drafts = np.full(num_sequences, block_size, np.int32) if num_drafts is None else num_drafts
    candidates = rank_candidates(survival_of(confidence, drafts))
    theta = throughput(candidates, num_sequences=num_sequences, seconds=seconds)
    match rule:
        case "prefix":
            num = early_stop_num(theta)
        case "lookahead":
            num = lookahead_num(
                candidates,
                theta,
                num_sequences=num_sequences,
                seconds=seconds,
                decay=0.8,
                max_ahead=num_sequences + 4,
            )
        case _:
            num = best_num(theta)
    return verify_len_of(candidates, num, num_sequences=num_sequences)


# -- the counterexample of section 4 ---------------------------------------------------------------------

TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])
SECONDS = 1.0 / np.array([1.0, 0.5, 0.45])  # of 1, 2, 3 tokens


def first_token(verify_len: Callable[[int], int]) -> Float64:
    """Return the exact distribution of the first output token under a rule of how many drafts to keep."""
    out = np.zeros(2)
    for x1 in (0, 1):
        if verify_len(x1) == 0:
            out += DRAFT[x1] * TARGET  # nothing kept: drawn from the target
            continue
        accept = min(1.0, TARGET[x1] / DRAFT[x1])
        out[x1] += DRAFT[x1] * accept
        left = np.maximum(TARGET - DRAFT, 0.0)
        out += DRAFT[x1] * (1.0 - accept) * left / left.sum()
    return out


def confidence_after(x1: int) -> Float64:
    return np.array([[0.8, 0.9 if x1 == 0 else 0.0]])


def test_the_naive_full_search_is_not_lossless() -> None:
    out = first_token(lambda x1: int(full_search(confidence_after(x1), SECONDS)[0]))
    assert out == pytest.approx([0.85, 0.15])


@pytest.mark.parametrize("rule", [prefix, lookahead])
def test_early_stop_is_lossless_on_the_counterexample(rule: Rule) -> None:
    out = first_token(lambda x1: int(rule(confidence_after(x1), SECONDS)[0]))
    assert out == pytest.approx(TARGET)


def test_a_budget_from_an_earlier_step_is_lossless_on_the_counterexample() -> None:
    for budget in (0, 1, 2):

        def lagged(x1: int, budget: int = budget) -> int:
            survival = survival_of(confidence_after(x1), np.array([2], np.int32))
            return int(verify_len_of(rank_candidates(survival), budget, num_sequences=1)[0])

        assert first_token(lagged) == pytest.approx(TARGET)


# -- law 4 -----------------------------------------------------------------------------------------------


def convex_seconds(rng: np.random.Generator, count: int) -> Float64:
    """Return a curve without cliffs: the cost of one more row never falls."""
    return float(rng.uniform(0.5, 5.0)) + np.cumsum(np.sort(rng.uniform(0.0, 0.6, count)))


def brute_force(survival: Float64, num_sequences: int, seconds: Float64) -> float:
    """Return the best Theta over all sets of prefixes."""
    best = 0.0
    block_size = survival.shape[1]
    for lengths in np.ndindex(*(block_size + 1,) * num_sequences):
        tokens = num_sequences + sum(survival[r, :n].sum() for r, n in enumerate(lengths))
        best = max(best, tokens / seconds[sum(lengths)])
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 3), block_size=st.integers(1, 4))
def test_early_stop_equals_exhaustive_search_on_a_smooth_curve(
    seed: int, num_sequences: int, block_size: int
) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.01, 1.0, (num_sequences, block_size))
    seconds = convex_seconds(rng, num_sequences * block_size + 1)
    verify_len = prefix(confidence, seconds)
    survival = np.cumprod(confidence, axis=1)
    tokens = num_sequences + survival[np.arange(block_size) < verify_len[:, None]].sum()
    found = tokens / seconds[verify_len.sum()]
    assert found == pytest.approx(brute_force(survival, num_sequences, seconds), rel=1e-6)
    assert np.array_equal(lookahead(confidence, seconds), verify_len)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 6), block_size=st.integers(1, 6))
def test_more_load_never_verifies_more(seed: int, num_sequences: int, block_size: int) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.0, 1.0, (num_sequences, block_size))
    count = num_sequences * block_size + 1
    # One more row costs the share of the step that it is at this load; load moves along a convex curve.
    curve = convex_seconds(rng, 4 * count)
    curve = np.maximum(curve, curve[0] * (1.0 + 0.02) ** np.arange(len(curve)))
    totals = [
        int(prefix(confidence, curve[load : load + count]).sum()) for load in range(0, 3 * count, count)
    ]
    steeper = [
        np.log(curve[load + 1 : load + count] / curve[load : load + count - 1])
        for load in (0, count, 2 * count)
    ]
    for light, heavy in ((0, 1), (1, 2)):
        if (steeper[heavy] >= steeper[light] - 1e-12).all():
            assert totals[heavy] <= totals[light]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 5), block_size=st.integers(2, 5))
def test_whether_a_draft_is_kept_never_depends_on_what_lies_behind_it(
    seed: int, num_sequences: int, block_size: int
) -> None:
    """Any curve, cliffs and all: c_{k+1}.. of one sequence are redrawn, the decision on x_k must not move."""
    rng = np.random.default_rng(seed)
    confidence = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0], (num_sequences, block_size))  # with ties
    seconds = 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.5, 2.0], num_sequences * block_size + 1))
    r, k = int(rng.integers(num_sequences)), int(rng.integers(block_size))
    changed = confidence.copy()
    changed[r, k + 1 :] = rng.uniform(0.0, 1.0, block_size - k - 1)
    for rule in (prefix, lookahead):
        kept, kept_after = (int(rule(c, seconds)[r]) > k for c in (confidence, changed))
        assert kept == kept_after
    # The same for a budget that was fixed earlier.
    drafts = np.full(num_sequences, block_size, np.int32)
    budget = int(rng.integers(num_sequences * block_size + 1))
    kept, kept_after = (
        int(verify_len_of(rank_candidates(survival_of(c, drafts)), budget, num_sequences=num_sequences)[r])
        > k
        for c in (confidence, changed)
    )
    assert kept == kept_after


def joint_of_two(drafts: tuple[int, ...], verify_len: int, target: Float64, draft: Float64) -> Float64:
    """Return the exact law of the first two output tokens [2, 2] given the drafts, under rejection sampling."""
    out = np.zeros((2, 2))

    def commit(tokens: tuple[int, ...], weight: float) -> None:
        """Plain decoding from here on."""
        if weight == 0.0:
            return
        if len(tokens) >= 2:
            out[tokens[0], tokens[1]] += weight
            return
        for token in (0, 1):
            commit((*tokens, token), weight * target[token])

    left = np.maximum(target - draft, 0.0)
    left = left / left.sum() if left.sum() else target
    weight, kept = 1.0, ()
    for x in drafts[:verify_len]:
        accept = min(1.0, target[x] / draft[x])
        for token in (0, 1):
            commit((*kept, token), weight * (1.0 - accept) * left[token])
        weight, kept = weight * accept, (*kept, x)
    commit(kept, weight)
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(["prefix", "lookahead", "budget"]))
def test_the_output_has_the_targets_law_whatever_the_confidences_say(seed: int, rule: str) -> None:
    """By exact enumeration of all blocks of two sequences; c_k is any function of the drafts before it."""
    rng = np.random.default_rng(seed)
    block_size = 3
    target, draft = (np.array([p, 1.0 - p]) for p in rng.uniform(0.1, 0.9, 2))
    seconds = 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.5, 2.0], 2 * block_size + 1))
    choices = [0.0, 0.3, 0.6, 0.9, 1.0]
    tables = [rng.choice(choices, (2,) * k) for k in range(block_size)]  # c_{k+1} given x_1..x_k
    other = rng.choice(choices, block_size)  # the second sequence of the batch
    budget = int(rng.integers(2 * block_size + 1))
    law = np.zeros((2, 2))
    for drafts in np.ndindex(*(2,) * block_size):
        confidence = np.stack([[tables[k][drafts[:k]] for k in range(block_size)], other])
        if rule == "budget":
            candidates = rank_candidates(survival_of(confidence, np.full(2, block_size, np.int32)))
            verify_len = verify_len_of(candidates, budget, num_sequences=2)
        else:
            verify_len = _choose(confidence, seconds, rule)
        law += draft[list(drafts)].prod() * joint_of_two(drafts, int(verify_len[0]), target, draft)
    np.testing.assert_allclose(law, np.outer(target, target), atol=1e-12)


# -- order, ties, odd input ------------------------------------------------------------------------------


def test_ties_are_broken_by_position_then_by_sequence() -> None:
    survival = survival_of(np.full((3, 2), 1.0), np.full(3, 2, np.int32))
    candidates = rank_candidates(survival)
    assert candidates.sequence.tolist() == [0, 1, 2, 0, 1, 2]
    assert [verify_len_of(candidates, n, num_sequences=3).tolist() for n in (1, 4)] == [[1, 0, 0], [2, 1, 1]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 40), block_size=st.integers(1, 16))
def test_candidates_fall_and_every_cut_leaves_whole_prefixes(
    seed: int, num_sequences: int, block_size: int
) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.choice([1.0, 0.999999999, 0.7, 0.1], (num_sequences, block_size))
    num_drafts = rng.integers(0, block_size + 1, num_sequences).astype(np.int32)
    survival = survival_of(confidence, num_drafts)
    candidates = rank_candidates(survival)
    assert len(candidates.survival) == num_drafts.sum()
    assert (np.diff(candidates.survival) <= 1e-7).all()  # ordered in single precision
    for num in range(len(candidates.survival) + 1):
        verify_len = verify_len_of(candidates, num, num_sequences=num_sequences)
        assert (verify_len <= num_drafts).all()
        taken = candidates.survival[:num].sum()
        assert taken == pytest.approx(survival[np.arange(block_size) < verify_len[:, None]].sum())


def test_a_confidence_that_is_not_a_number_ends_the_block_there() -> None:
    survival = survival_of(np.array([[0.9, np.nan, 0.9], [np.nan, 1.0, 1.0]]), np.array([3, 3], np.int32))
    assert survival.tolist() == [[0.9, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_looking_ahead_crosses_a_small_cliff_where_early_stop_is_trapped() -> None:
    confidence = np.full((1, 6), 0.95)
    seconds = np.array([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])  # two rows cost as much as seven
    assert prefix(confidence, seconds).tolist() == [0]
    assert lookahead(confidence, seconds).tolist() == [6]
    assert lookahead(np.full((1, 6), 0.2), seconds).tolist() == [0]


@pytest.mark.parametrize(("num_sequences", "block_size", "limit_s"), [(256, 8, 0.3e-3), (1024, 16, 2e-3)])
def test_the_whole_choice_stays_within_its_budget(
    num_sequences: int, block_size: int, limit_s: float
) -> None:
    """Not a benchmark: the best of many runs against three times the budget; only a blunder fails."""
    rng = np.random.default_rng(0)
    confidence = rng.beta(4, 1.5, (num_sequences, block_size))
    seconds = 1.0 + 1e-3 * np.arange(num_sequences * block_size + 1)
    best = min(_timed(lambda: prefix(confidence, seconds)) for _ in range(30))
    assert best < 3 * limit_s


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
