"""Laws of coupled verification: a named seed gives one output, whoever drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution
from dspark.sampling.gumbel import gumbel_argmax
from dspark.sampling.philox import Purpose
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import coupled_acceptance, rejection_acceptance, verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import assert_distributed_as

V = 40

PARAMS = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 1.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"bad_words_ids": ((1,), (0, 4)), "min_tokens": 5},
]


def sampler(seed: int, **params: Any) -> TokenSampler:
    return TokenSampler(
        SamplingParams(seed=seed, **params), seed=seed, prompt_ids=[0], vocab_size=V, eos_ids=[2]
    )


def plain(target: np.ndarray, sampler: TokenSampler, num_tokens: int) -> list[int]:
    output = [0]
    while len(output) <= num_tokens:
        output.append(sampler.sample(target[output[-1]], position=len(output)))
        sampler.commit(output[-1:])
    return output[1:]


@pytest.mark.parametrize("params", PARAMS)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    closeness=st.sampled_from([0.0, 0.9, 1.0]),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    kind=st.sampled_from(["dense", "one_hot", "reduced"]),
)
def test_speculative_output_equals_plain_output_token_for_token(
    params: dict[str, Any], seed: int, closeness: float, lengths: list[int], kind: str
) -> None:
    rng = np.random.default_rng(seed)
    target, other = (rng.normal(size=(2, V, V)) * 2).astype(np.float32)
    draft_logits = (closeness * target + (1 - closeness) * other).astype(np.float32)
    token_ids = rng.permutation(V)[: V // 2].astype(np.int32) if kind == "reduced" else None
    expected = plain(target, sampler(seed, **params), 10)
    made, output, step = sampler(seed, **params), [0], 0
    while len(output) <= 10:
        position = len(output)
        drafts: list[int] = []
        qs: list[Distribution | None] = []
        for k in range(lengths[step % len(lengths)]):
            logits = draft_logits[[output[-1], *drafts][-1]]
            if kind == "one_hot":
                drafts.append(int(logits.argmax()))
                qs.append(None)
                continue
            q = made.distribution(
                logits if token_ids is None else logits[token_ids], drafted=drafts, token_ids=token_ids
            )
            drafts.append(made.draw(q, position=position + k, purpose=Purpose.DRAFT))
            qs.append(q)
        verdict = verify_chain(made, target[[output[-1], *drafts]], None, drafts, qs, position=position)
        if closeness == 1.0 and kind == "dense":
            assert verdict.accepted == len(drafts)
        made.commit(verdict.token_ids)
        output += verdict.token_ids
        step += 1
    assert output[1:11] == expected


@pytest.mark.parametrize("params", PARAMS)
def test_plain_seeded_tokens_are_distributed_as_the_target(params: dict[str, Any]) -> None:
    target = (np.random.default_rng(1).normal(size=(V, V)) * 1.5).astype(np.float32)
    counts = np.zeros(V)
    for seed in range(1500):
        counts[plain(target, sampler(seed, **params), 1)[0]] += 1
    assert_distributed_as(counts, sampler(0, **params).distribution(target[0]).dense(V))


def pair(seed: int) -> tuple[Distribution, Distribution]:
    """Two overlapping distributions, p dense and q sparse, [V]."""
    rng = np.random.default_rng(seed)
    p = rng.random(V) ** 4 * (rng.random(V) > 0.3)
    ids = np.sort(rng.choice(V, V // 2, replace=False)).astype(np.int32)
    p[ids[0]] += 0.5
    q = p[ids] + 0.05 * rng.random(len(ids))
    return Distribution(None, p / p.sum()), Distribution(ids, q / q.sum())


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_equals_its_double_sum_and_keeps_its_bounds(seed: int) -> None:
    p, q = pair(seed)
    a, b = p.dense(V), q.dense(V)
    shared = np.flatnonzero((a > 0) & (b > 0))
    expected = sum(1 / np.maximum(a / a[x], b / b[x]).sum() for x in shared)
    assert coupled_acceptance(p, q) == pytest.approx(expected, rel=1e-12)
    assert coupled_acceptance(q, p) == pytest.approx(expected, rel=1e-12)
    distance = 1 - rejection_acceptance(p, q)
    assert (1 - distance) / (1 + distance) - 1e-12 <= expected <= 1 - distance + 1e-12


def test_acceptance_is_how_often_the_races_agree() -> None:
    p, q = pair(3)
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p.probs), np.log(q.probs)
    agreed = sum(
        gumbel_argmax(log_p, None, seed=5, position=i)
        == gumbel_argmax(log_q, q.token_ids, seed=5, position=i)
        for i in range(3000)
    )
    acceptance = coupled_acceptance(p, q)
    assert_distributed_as([agreed, 3000 - agreed], [acceptance, 1 - acceptance])


def test_acceptance_of_disjoint_and_equal_distributions_is_certain() -> None:
    p = Distribution(np.array([1, 3], np.int32), np.array([0.25, 0.75]))
    assert coupled_acceptance(p, Distribution.one_hot(2)) == 0.0
    assert coupled_acceptance(p, Distribution.one_hot(3)) == pytest.approx(0.75)
    assert coupled_acceptance(p, p) == pytest.approx(1.0)


def test_labels_are_given_for_every_position_looked_at() -> None:
    target = (np.random.default_rng(2).normal(size=(V, V))).astype(np.float32)
    made = sampler(8)
    drafts = plain(target, sampler(8), 2)
    drafts.append((plain(target, sampler(8), 3)[-1] + 1) % V)
    rows = target[[0, *drafts]]
    verdict = verify_chain(made, rows, None, drafts, None, position=1, soft_labels=True)
    assert verdict.accepted == 2
    expected = [made.distribution(rows[k]).probs[drafts[k]] for k in range(3)]
    assert verdict.soft_labels == pytest.approx(expected)
