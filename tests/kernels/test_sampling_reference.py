"""The device's plain sampling draws what the engine's own draws: same counters, same transforms, same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dspark.request import SamplingParams
from dspark.sampling.gumbel import token_gumbel as engine_noise
from dspark.sampling.philox import Purpose, philox4x32_words, uniform_scalar
from dspark.sampling.transforms import SampledRule, TokenSampler
from dspark.sampling.truncation import truncate
from dspark.sampling.verification import verify_chain
from dspark_plugins.reference import sampling
from dspark_plugins.reference.verify import verify

SEEDS = [0, 1, 2**31, 2**63 - 1, -5]

FORMS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
}


def row_params(form: str, n: int) -> tuple[torch.Tensor, ...]:
    params = SamplingParams(**FORMS[form])
    return (
        torch.full((n,), params.temperature),
        torch.full((n,), params.top_k, dtype=torch.int32),
        torch.full((n,), params.top_p),
        torch.full((n,), params.min_p),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_words_are_the_engines(seed: int) -> None:
    lanes, position = torch.arange(40), torch.tensor(12345)
    words = sampling.philox4x32(torch.tensor(seed), lanes, position, 4)
    expected = [philox4x32_words(seed % 2**64, lane, 12345, 4) for lane in range(40)]
    assert list(zip(*(word.tolist() for word in words), strict=True)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_numbers_are_the_engines(seed: int) -> None:
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        mine = sampling.uniform(torch.tensor([seed]), torch.tensor([77]), int(purpose), 3)
        assert mine.item() == uniform_scalar(seed % 2**64, 77, purpose, 3)


def test_token_noise_is_the_engines_to_the_last_places() -> None:
    ids = torch.randperm(50_000)[:3000]
    mine = sampling.token_gumbel(torch.tensor([9]), torch.tensor([4]), ids)[0]
    expected = engine_noise(ids.numpy(), seed=9, position=4)
    np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_what_stays_of_a_row_is_what_the_engine_keeps(form: str) -> None:
    rng = np.random.default_rng(3)
    params = SamplingParams(**FORMS[form])
    # Rounded: many equal logits, whose order must not matter.
    logits = np.round(rng.normal(size=(20, 300)) * 2, 1).astype(np.float32)
    log_weights, finite = sampling.truncated_weights(torch.from_numpy(logits), *row_params(form, 20))
    assert finite.all()
    for row, mine in zip(logits, log_weights, strict=True):
        kept = mine.gt(float("-inf")).nonzero()[:, 0].numpy()
        if params.greedy:
            assert kept.tolist() == [int(row.argmax())]
            continue
        scaled = (row - row.max()) * np.float32(1 / params.temperature)
        expected = truncate(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        assert kept.tolist() == (list(range(300)) if expected is None else expected.tolist())


@pytest.mark.parametrize(
    ("rule", "length", "looked_up"),
    [("block", 4, (2,)), ("block", 4, (0, 1, 2, 3)), ("block", 1, ()), ("coupled", 4, (2,))],
)
@pytest.mark.parametrize("form", FORMS)
def test_chains_are_verified_as_the_engine_does(
    form: str, rule: SampledRule, length: int, looked_up: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(7)
    vocab_size, num_chains = (
        60,
        24 if len(looked_up) < length else 120,
    )  # one-hot drafts are accepted less often
    params = SamplingParams(**FORMS[form])
    logits = (rng.normal(size=(num_chains, length + 1, vocab_size)) * 2).astype(np.float32)
    drafted_from = logits + rng.normal(size=logits.shape).astype(np.float32) * 0.3
    tokens = np.zeros((num_chains, length + 1), np.int32)
    probs = np.zeros((num_chains * length, vocab_size), np.float32)
    rows = np.full((num_chains, length + 1), -1, np.int32)
    expected = []
    for i in range(num_chains):
        position = 10 + i
        sampler = TokenSampler(
            params, seed=i, prompt_ids=[0] * position, vocab_size=vocab_size, eos_ids=[], rule=rule
        )
        drafts, distributions = [], []
        for k in range(length):
            q = sampler.distribution(drafted_from[i, k], drafted=drafts)
            drafts.append(sampler.draw(q, position=position + k, purpose="draft"))
            distributions.append(None if k in looked_up else q)
            probs[i * length + k] = q.dense(vocab_size)
            rows[i, k + 1] = -1 if k in looked_up else i * length + k
        tokens[i, 1:] = drafts
        verdict = verify_chain(
            sampler, logits[i], None, drafts, distributions, position=position, rule=sampler.rule
        )
        expected.append((verdict.accepted, verdict.token_ids[-1]))
    out = verify(
        torch.from_numpy(logits.reshape(-1, vocab_size)),
        torch.from_numpy(tokens.ravel()),
        torch.arange(0, num_chains * (length + 1) + 1, length + 1, dtype=torch.int32),
        None,
        torch.from_numpy(probs),
        torch.from_numpy(rows.ravel()),
        None,
        torch.arange(10, 10 + num_chains, dtype=torch.int32),
        torch.arange(num_chains),
        *row_params(form, num_chains),
        torch.full((num_chains,), int(rule == "coupled"), dtype=torch.int32),
        length,
    )
    assert list(zip(out.accepted.tolist(), out.next_token.tolist(), strict=True)) == expected
    assert len({accepted for accepted, _ in expected}) > 1  # the case tells something
    assert all(
        path[:n] == list(range(1, n + 1)) for path, n in zip(out.path.tolist(), out.accepted, strict=True)
    )
