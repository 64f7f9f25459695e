"""Laws of rejection sampling: the committed tokens are distributed as the target's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark.errors import ConfigError, NonFiniteError
from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution
from dspark.sampling.philox import Purpose
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import rejection_acceptance, rejection_step, verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import assert_distributed_as

V = 6
GRID = (np.arange(400) + 0.5) / 400
REDUCED = np.array([4, 0, 3], np.int32)  # draft vocabulary, in no order

PARAMS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "bad_words": {"bad_words_ids": ((1,), (0, 4)), "min_tokens": 2},
}


def distribution(rng: np.random.Generator, form: str) -> Distribution:
    """A random distribution over V tokens: dense (some of them impossible) or sparse."""
    if form == "dense":
        weights = rng.random(V) ** 3 * (rng.random(V) > 0.2)
        weights[rng.integers(V)] += 0.1
        return Distribution(None, weights / weights.sum())
    ids = np.sort(rng.choice(V, rng.integers(1, V), replace=False)).astype(np.int32)
    weights = rng.random(len(ids)) + 0.01
    return Distribution(ids, weights / weights.sum())


def committed(p: Distribution, q: Distribution | None, draft: int) -> np.ndarray:
    """Distribution of the committed token given the draft, by going through both uniforms, [V]."""
    accepted = np.mean([rejection_step(p, q, draft, accept_u=u, replace_u=0.5) == draft for u in GRID])
    out = np.zeros(V)
    out[draft] += accepted
    if accepted < 1.0:
        for u in GRID:
            out[rejection_step(p, q, draft, accept_u=1 - 1e-12, replace_u=u)] += (1 - accepted) / len(GRID)
    return out


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["dense", "sparse"]), st.sampled_from(["dense", "sparse"]))
def test_committed_token_is_distributed_as_the_target_exactly(seed: int, p_form: str, q_form: str) -> None:
    rng = np.random.default_rng(seed)
    p, q = distribution(rng, p_form), distribution(rng, q_form)
    q_dense = q.dense(V)
    given_draft = {draft: committed(p, q, draft) for draft in np.flatnonzero(q_dense).tolist()}
    total = sum(q_dense[draft] * out for draft, out in given_draft.items())
    np.testing.assert_allclose(total, p.dense(V), atol=3 / len(GRID))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["dense", "sparse"]), st.integers(0, V - 1))
def test_looked_up_drafts_leave_the_target_distribution_exactly(seed: int, p_form: str, draft: int) -> None:
    p = distribution(np.random.default_rng(seed), p_form)
    for q in (None, Distribution.one_hot(draft)):
        np.testing.assert_allclose(committed(p, q, draft), p.dense(V), atol=3 / len(GRID))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["dense", "sparse"]), st.sampled_from(["dense", "sparse"]))
def test_acceptance_is_one_minus_the_total_variation(seed: int, p_form: str, q_form: str) -> None:
    rng = np.random.default_rng(seed)
    p, q = distribution(rng, p_form), distribution(rng, q_form)
    expected = 1 - 0.5 * np.abs(p.dense(V) - q.dense(V)).sum()
    assert rejection_acceptance(p, q) == pytest.approx(expected, abs=1e-12)


def test_drafts_from_the_target_itself_are_always_accepted() -> None:
    p = Distribution(None, np.full(V, 1 / V))
    for u in GRID:
        assert rejection_step(p, p, 2, accept_u=u, replace_u=0.5) == 2


def request_sampler(params: dict[str, Any], seed: int) -> TokenSampler:
    made = SamplingParams(**params)
    return TokenSampler(made, seed=seed, prompt_ids=[0], vocab_size=V, eos_ids=[2], rule="rejection")


def draft_chain(
    sampler: TokenSampler, logits_after: np.ndarray, kind: str, num_drafts: int, position: int, anchor: int
) -> tuple[list[int], list[Distribution | None]]:
    drafts: list[int] = []
    distributions: list[Distribution | None] = []
    for k in range(num_drafts):
        logits = logits_after[([anchor, *drafts])[-1]]
        if kind == "one_hot":
            q, token_id = None, int(logits.argmax())
        else:
            token_ids = REDUCED if kind == "reduced" else None
            logits = logits if token_ids is None else logits[token_ids]
            q = sampler.distribution(logits, drafted=drafts, token_ids=token_ids)
            token_id = sampler.draw(q, position=position + k, purpose=Purpose.DRAFT)
        drafts.append(token_id)
        distributions.append(q)
    return drafts, distributions


def pair_probs(logits_after: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Exact distribution of the first two output tokens, [V, V]."""
    sampler = request_sampler(params, 0)
    first = sampler.distribution(logits_after[0]).dense(V)
    pairs = [first[x] * sampler.distribution(logits_after[x], drafted=[x]).dense(V) for x in range(V)]
    return np.array(pairs)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("kind", ["dense", "one_hot", "reduced"])
@pytest.mark.parametrize("name", PARAMS)
def test_first_two_tokens_are_distributed_as_plain_ones(name: str, kind: str, labelled: bool) -> None:
    rng = np.random.default_rng(3)
    target = (rng.normal(size=(V, V)) * 1.5).astype(np.float32)
    draft = (0.6 * target + 0.3 * rng.normal(size=(V, V))).astype(np.float32)
    counts, num_accepted = np.zeros((V, V)), 0
    for seed in range(2500):
        sampler, output = request_sampler(PARAMS[name], seed), [0]
        while len(output) < 3:
            # Three drafts, of which two are verified: the third is cut off and its position drafted again.
            position = len(output)
            drafts, qs = draft_chain(sampler, draft, kind, 3, position, output[-1])
            rows = target[[output[-1], *drafts[:2]]]
            verdict = verify_chain(
                sampler,
                rows,
                None,
                drafts[:2],
                qs[:2],
                position=position,
                soft_labels=labelled,
                cut_off=(drafts[2], qs[2]) if labelled else None,
            )
            sampler.commit(verdict.token_ids)
            output += verdict.token_ids
            num_accepted += verdict.accepted
        counts[output[1], output[2]] += 1
    assert_distributed_as(counts, pair_probs(target, PARAMS[name]))
    assert num_accepted > 100


def test_labels_are_the_exact_acceptance_of_every_position_looked_at() -> None:
    rng = np.random.default_rng(0)
    target, draft = (rng.normal(size=(2, V, V))).astype(np.float32)
    sampler = request_sampler({}, 4)
    drafts, qs = draft_chain(sampler, draft, "dense", 3, 1, 0)
    rows = target[[0, *drafts]]
    verdict = verify_chain(sampler, rows, None, drafts, qs, position=1, soft_labels=True)
    expected = [
        1 - 0.5 * np.abs(sampler.distribution(rows[k], drafted=drafts[:k]).probs - qs[k].probs).sum()
        for k in range(min(verdict.accepted + 1, 3))
    ]
    assert verdict.soft_labels == pytest.approx(expected)
    assert verify_chain(sampler, rows, None, drafts, qs, position=1).soft_labels is None
    looked_up = verify_chain(sampler, rows, None, drafts, None, position=1, soft_labels=True)
    assert looked_up.soft_labels is not None
    assert looked_up.soft_labels[0] == pytest.approx(sampler.distribution(rows[0]).probs[drafts[0]])


@pytest.mark.parametrize("kind", ["dense", "one_hot", "reduced"])
def test_the_row_of_the_added_token_labels_the_draft_that_was_cut_off(kind: str) -> None:
    rng = np.random.default_rng(1)
    target = rng.normal(size=(V, V)).astype(np.float32)
    seen = 0
    for seed in range(40):
        sampler = request_sampler({"temperature": 0.8}, seed)
        drafts, qs = draft_chain(sampler, target + 0.3, kind, 3, 1, 0)
        rows = target[[0, *drafts[:2]]]
        cut_off = (drafts[2], qs[2])
        verdict = verify_chain(
            sampler, rows, None, drafts[:2], qs[:2], position=1, soft_labels=True, cut_off=cut_off
        )
        assert verdict.soft_labels is not None
        assert len(verdict.soft_labels) == verdict.accepted + 1
        if verdict.accepted < 2:
            continue
        seen += 1
        p = sampler.distribution(rows[2], drafted=drafts[:2]).dense(V)
        q = np.eye(V)[drafts[2]] if qs[2] is None else qs[2].dense(V)
        assert verdict.soft_labels[2] == pytest.approx(1 - 0.5 * np.abs(p - q).sum())
    assert seen > 3


def test_rows_behind_the_first_rejection_are_never_read() -> None:
    logits = np.full((3, V), np.nan, np.float32)
    logits[0] = [-50.0, 50.0, 0.0, 0.0, 0.0, 0.0]
    sampler = request_sampler({}, 4)
    assert verify_chain(sampler, logits, None, [0, 1], None, position=1).token_ids == (1,)
    assert verify_chain(sampler, logits, None, [1, 1], None, position=1).token_ids == (1,)
    with pytest.raises(NonFiniteError):
        verify_chain(sampler, logits[1:], None, [1], None, position=1)


def test_coupling_is_refused_where_the_seed_was_drawn() -> None:
    with pytest.raises(ConfigError, match="got 'coupled'.*'rejection'"):
        verify_chain(
            request_sampler({}, 1), np.zeros((1, V), np.float32), None, [], None, position=1, rule="coupled"
        )
