"""Laws of greedy verification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark.errors import ConfigError, NonFiniteError
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import Verdict, verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st

V = 6


def sampler(**params: Any) -> TokenSampler:
    return TokenSampler(
        SamplingParams(temperature=0.0, **params), seed=1, prompt_ids=[0], vocab_size=V, eos_ids=[2]
    )


def plain(logits_after: np.ndarray, sampler: TokenSampler, num_tokens: int) -> list[int]:
    """Decode one token at a time from logits that depend on the last token."""
    last, output = 0, []
    for _ in range(num_tokens):
        last = sampler.greedy_token(logits_after[last])
        sampler.commit([last])
        output.append(last)
    return output


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"bad_words_ids": ((3,), (1, 4))},
        {"min_tokens": 9},
    ],
)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), drafting=st.randoms(use_true_random=False), known=st.booleans())
def test_speculative_output_equals_plain_output(
    params: dict[str, Any], seed: int, drafting: Any, known: bool
) -> None:
    logits_after = (np.random.default_rng(seed).normal(size=(V, V)) * 2).astype(np.float32)
    expected = plain(logits_after, sampler(**params), 12)
    speculative, output = sampler(**params), []
    while len(output) < 12:
        # Drafts are right for a while, then anything.
        right = drafting.randrange(4)
        drafts = expected[len(output) : len(output) + right] + [drafting.randrange(V) for _ in range(2)]
        rows = logits_after[[(output or [0])[-1], *drafts]]
        argmax = rows.argmax(axis=1).astype(np.int32) if known else None
        verdict = verify_chain(speculative, rows, argmax, drafts, None, position=1 + len(output))
        assert verdict.token_ids[:-1] == tuple(drafts[: verdict.accepted])
        assert verdict.accepted >= min(right, 12 - len(output))
        speculative.commit(verdict.token_ids)
        output += verdict.token_ids
    assert output[:12] == expected


def test_rows_behind_the_first_rejection_are_never_read() -> None:
    logits = np.full((4, V), np.nan, np.float32)
    logits[:2] = np.eye(V, dtype=np.float32)[[3, 4]]
    assert verify_chain(sampler(), logits, None, [3, 5, 1], None, position=1) == Verdict(1, (3, 4))
    assert verify_chain(sampler(), logits, None, [3, 4, 1], None, position=1) == Verdict(1, (3, 4))
    with pytest.raises(NonFiniteError):
        verify_chain(sampler(), logits[2:], None, [3], None, position=1)


def test_no_drafts_give_one_token() -> None:
    logits = np.eye(V, dtype=np.float32)[[4]]
    assert verify_chain(sampler(), logits, np.array([4], np.int32), [], None, position=1) == Verdict(0, (4,))


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_rules_for_sampled_drafts_are_refused_at_temperature_zero(rule: Any) -> None:
    with pytest.raises(ConfigError, match=f"got '{rule}'.*'greedy'"):
        verify_chain(sampler(), np.eye(V, dtype=np.float32)[[4]], None, [], None, position=1, rule=rule)
