"""What the engine makes of rows that are not finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspark.drafters.interface import DraftBlock
from dspark.engine.judging import judge_drafts
from dspark.executors.interface import TargetOutput
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler, VerificationRule

P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])


def first_token(rule: VerificationRule, seed: int) -> int:
    """Return the first token of two drafts from Q, where token 0 leads to a row that is not finite."""
    params = SamplingParams(temperature=1.0)
    sampler = TokenSampler(params, seed=seed, prompt_ids=[0], vocab_size=2, eos_ids=[], rule=rule)
    q = sampler.distribution(np.log(Q).astype(np.float32))
    drafts = [sampler.draw(q, position=1 + k, purpose="draft") for k in range(2)]
    logits = np.log(np.array([P, P, P])).astype(np.float32)
    if drafts[0] == 0:
        logits[1:] = np.nan
    finite = np.isfinite(logits).all(axis=1)
    block = DraftBlock(
        tokens=np.array([drafts], np.int32),
        num_tokens=np.array([2], np.int32),
        distributions=((q, q),),
        confidence_logits=None,
    )
    sequence: Any = SimpleNamespace(sampler=sampler, token_ids=[0], request=SimpleNamespace(params=params))
    output = TargetOutput(logits=logits, argmax=np.zeros(3, np.int32), finite=finite, features=None)
    return judge_drafts(sequence, block, 0, num_drafts=2, span=slice(0, 3), output=output).token_ids[0]


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_a_row_that_is_not_finite_does_not_bend_the_draft_that_leads_to_it(rule: VerificationRule) -> None:
    num = 3000
    share = sum(first_token(rule, seed) == 0 for seed in range(num)) / num
    assert abs(share - P[0]) < 5 * np.sqrt(P[0] * P[1] / num)
