"""Laws of a request's logit transforms, against code that follows their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark.errors import NonFiniteError, RequestError
from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution
from dspark.sampling.philox import Purpose
from dspark.sampling.transforms import SampledRule, TokenSampler, inverse_cdf
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import assert_distributed_as

V = 12
EOS = 2


def sampler(
    prompt: list[int] | None = None, *, drawn_seed: int = 7, output: list[int] | None = None, **params: Any
) -> TokenSampler:
    made = TokenSampler(
        SamplingParams(**params),
        seed=params.get("seed", drawn_seed),
        prompt_ids=prompt or [1],
        vocab_size=V,
        eos_ids=[EOS],
    )
    made.commit(output or [])
    return made


def row(seed: int = 0, n: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * 2).astype(np.float32)


def naive_probs(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], ends: set[int]
) -> np.ndarray:
    """Every transform by its definition, token by token, in float64."""
    x = logits.astype(np.float64)
    history = prompt + output
    for word in params.bad_words_ids:
        if len(word) == 1 or history[-(len(word) - 1) :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(ends)] = -np.inf
    for token in range(len(x)):
        if token in history:
            x[token] = (
                x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
            )
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (
            token in output
        )
    x /= params.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(x[order] - x.max())
    order = order[: int(np.argmax(weights.cumsum() >= params.top_p * weights.sum() - 1e-9)) + 1]
    order = [token for token in order if np.exp(x[token] - x.max()) >= params.min_p]
    probs = np.zeros(len(x))
    probs[order] = np.exp(x[order] - x.max())
    return probs / probs.sum()


_PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 4]),
        "top_p": st.sampled_from([1.0, 0.83]),
        "min_p": st.sampled_from([0.0, 0.11]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.45, -0.3]),
        "bad_words_ids": st.lists(
            st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple), max_size=3
        ).map(tuple),
        "min_tokens": st.sampled_from([0, 3]),
    }
)
_IDS = st.lists(st.integers(0, V - 1), max_size=6)


@settings(max_examples=400, deadline=None)
@given(_PARAMS, _IDS, _IDS, _IDS, st.integers(0, 10**6))
def test_distribution_equals_the_definitions(
    params: dict[str, Any], prompt: list[int], output: list[int], drafted: list[int], seed: int
) -> None:
    prompt = prompt or [0]
    made = sampler(prompt, output=output, **params)
    logits = row(seed)
    untouched = logits.copy()
    expected = naive_probs(logits, made.params, prompt, output + drafted, {EOS})
    got = made.distribution(logits, drafted=drafted)
    np.testing.assert_allclose(got.dense(V), expected, atol=2e-6)
    assert got.probs.dtype == np.float64
    np.testing.assert_array_equal(logits, untouched)


@settings(max_examples=200, deadline=None)
@given(_PARAMS, _IDS, _IDS, st.integers(0, 10**6))
def test_drafted_tokens_count_like_committed_ones(
    params: dict[str, Any], output: list[int], drafted: list[int], seed: int
) -> None:
    over = sampler(output=output, **params).distribution(row(seed), drafted=drafted)
    committed = sampler(output=output + drafted, **params).distribution(row(seed))
    np.testing.assert_array_equal(over.dense(V), committed.dense(V))


@settings(max_examples=200, deadline=None)
@given(_PARAMS, _IDS, st.permutations(range(V)), st.integers(0, 10**6))
def test_reduced_vocabulary_equals_the_rest_being_impossible(
    params: dict[str, Any], drafted: list[int], order: list[int], seed: int
) -> None:
    token_ids = np.array(order[:8], np.int32)
    full = row(seed)
    full[order[8:]] = -np.inf
    params["bad_words_ids"] = ()
    made = sampler(**params)
    got = made.distribution(full[token_ids], drafted=drafted, token_ids=token_ids)
    np.testing.assert_allclose(got.dense(V), made.distribution(full, drafted=drafted).dense(V), atol=1e-12)
    assert got.token_ids is not None
    assert (np.diff(got.token_ids) > 0).all()
    greedy = sampler(**{**params, "temperature": 0.0})
    assert greedy.greedy_token(full[token_ids], drafted=drafted, token_ids=token_ids) == greedy.greedy_token(
        full, drafted=drafted
    )


def test_history_transforms_apply_at_temperature_zero() -> None:
    logits = np.array([0.0, 3.0, 0.0, 2.9, 2.0] + [0.0] * 7, np.float32)
    assert sampler(temperature=0.0).greedy_token(logits) == 1
    assert sampler(temperature=0.0, repetition_penalty=1.2).greedy_token(logits) == 3
    assert sampler(temperature=0.0, bad_words_ids=((1,), (5, 3))).greedy_token(logits, drafted=[5]) == 4
    assert sampler(temperature=0.0, presence_penalty=0.5).greedy_token(logits) == 1  # prompt tokens are free
    assert sampler(temperature=0.0, presence_penalty=0.5).greedy_token(logits, drafted=[1]) == 3


@pytest.mark.parametrize("prompt_len", [0, 40, 63, 64, 100])
def test_penalties_follow_their_definition_however_many_tokens_were_seen(prompt_len: int) -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    vocab_size = 300
    prompt, answer = list(range(prompt_len)), [*range(50, 250), 60, 249]
    made = TokenSampler(params, seed=1, prompt_ids=prompt, vocab_size=vocab_size, eos_ids=[EOS])
    for token in answer:  # one at a time: any of them may be the first that finds no room
        made.commit([token])
    logits = row(3, vocab_size)
    expected = naive_probs(logits, params, prompt, answer, {EOS})
    np.testing.assert_allclose(made.distribution(logits).dense(vocab_size), expected, atol=2e-6)


def test_known_argmax_is_used_only_where_nothing_alters_the_row() -> None:
    logits = row()
    logits[EOS] = 50.0
    made = sampler(temperature=0.0, min_tokens=2)
    assert made.alters(1) and not made.alters(2)
    assert made.greedy_token(logits, drafted=[0], argmax=EOS) != EOS
    assert made.greedy_token(logits, drafted=[0, 0], argmax=EOS) == EOS


def test_greedy_ties_go_to_the_lowest_id() -> None:
    made = sampler(temperature=0.0)
    assert made.greedy_token(np.zeros(V, np.float32)) == 0
    assert made.greedy_token(np.zeros(3, np.float32), token_ids=np.array([9, 4, 6], np.int32)) == 4


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, {EOS}),
        ({"end_id": 5}, {5}),
        ({"end_id": -1}, set()),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "end_id": 5, "stop_token_ids": (7,)}, {7}),
        ({"stop_token_ids": (7, 8)}, {EOS, 7, 8}),
    ],
)
def test_end_tokens_follow_the_request(params: dict[str, Any], ends: set[int]) -> None:
    assert sampler(**params).end_ids == ends


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("end_id", {"end_id": V}),
        ("stop_token_ids", {"stop_token_ids": (3, V)}),
        ("bad_words", {"bad_words_ids": ((1, -1),)}),
        ("input_ids", {"prompt": [0, V + 3]}),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_field(field: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: got .*token ids from 0 to {V - 1}"):
        sampler(**params)


@pytest.mark.parametrize("poison", [np.nan, np.inf, "no token"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5, "repetition_penalty": 1.5}])
def test_rows_that_are_not_finite_are_refused(poison: Any, params: dict[str, Any]) -> None:
    logits = row()
    if poison == "no token":
        logits[:] = -np.inf
    else:
        logits[7] = poison
    made = sampler(**params)
    for call in (made.distribution, made.greedy_token):
        with pytest.raises(NonFiniteError):
            call(logits)
    with pytest.raises(NonFiniteError):
        made.sample(logits, position=1)


def test_impossible_tokens_are_no_fault_and_never_drawn() -> None:
    logits = row()
    logits[:6] = -np.inf
    for params in ({}, {"top_p": 0.9}, {"top_k": 9}, {"repetition_penalty": 2.0, "frequency_penalty": 2.0}):
        probs = sampler(output=[1, 2, 8], **params).distribution(logits).dense(V)
        assert (probs[:6] == 0).all()
        assert probs.sum() == pytest.approx(1.0)


def test_bans_that_leave_no_token_are_refused() -> None:
    made = sampler(bad_words_ids=tuple((token,) for token in range(V)))
    with pytest.raises(RequestError, match="bad_words"):
        made.distribution(row())


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-42}, {"temperature": 1e30}, {"repetition_penalty": 1e-30}]
)
def test_extreme_parameters_still_give_a_distribution(params: dict[str, float]) -> None:
    probs = sampler(**params).distribution(row() * 100).dense(V)
    assert np.isfinite(probs).all()
    assert probs.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("n", [6, 5000])
def test_tokens_are_drawn_as_often_as_the_distribution_says(seed: int | None, n: int) -> None:
    made = TokenSampler(SamplingParams(seed=seed), seed=5, prompt_ids=[0], vocab_size=n, eos_ids=[])
    logits = np.full(n, -20.0, np.float32)
    logits[-5:] = [1.0, 0.5, 0.0, -1.0, -2.0]
    distribution = made.distribution(logits)
    sampled, drawn = np.zeros(n), np.zeros(n)
    for position in range(2500):
        sampled[made.sample(logits, position=position)] += 1
        drawn[made.draw(distribution, position=position, purpose="sample")] += 1
    assert_distributed_as(sampled, distribution.probs)
    np.testing.assert_array_equal(sampled, drawn)


def test_drawing_is_a_function_of_seed_and_position_alone() -> None:
    logits = row()
    for params in ({}, {"seed": 3}, {"top_p": 0.9}, {"top_k": 3, "seed": 3}):
        first, second = sampler(drawn_seed=3, **params), sampler(drawn_seed=3, **params)
        forwards = [first.sample(logits, position=position) for position in range(40)]
        backwards = [second.sample(logits, position=position) for position in reversed(range(40))]
        assert forwards == backwards[::-1]
        assert len(set(forwards)) > 1


def test_named_seeds_draw_drafts_and_target_tokens_with_the_same_noise() -> None:
    made = sampler(drawn_seed=3, top_k=5)
    named = sampler(seed=3, top_k=5)
    logits = row()
    agreed = 0
    for position in range(200):
        tokens = {
            named.draw(named.distribution(logits), position=position, purpose=purpose) for purpose in Purpose
        }
        assert tokens == {named.sample(logits, position=position)}
        distribution = made.distribution(logits)
        agreed += made.draw(distribution, position=position, purpose=Purpose.DRAFT) == made.draw(
            distribution, position=position, purpose=Purpose.SAMPLE
        )
    assert agreed < 150  # drawn seeds: drafts and replacements are independent


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_a_position_that_is_drafted_again_gets_fresh_noise(rule: SampledRule) -> None:
    made = TokenSampler(
        SamplingParams(temperature=1.0), seed=3, prompt_ids=[1, 2, 3], vocab_size=10, eos_ids=[], rule=rule
    )
    first = made.uniform(5, Purpose.DRAFT)
    accept, replace = made.uniform(5, Purpose.ACCEPT), made.uniform(5, Purpose.REPLACE)
    made.commit([4])
    assert made.uniform(5, Purpose.DRAFT) != first
    # Of a block all numbers are looked at, token by token none behind the first refused draft.
    assert (made.uniform(5, Purpose.ACCEPT) == accept) == (rule == "rejection")
    assert made.uniform(5, Purpose.REPLACE) == replace


@pytest.mark.parametrize("n", [3, 10_000])
def test_inverse_cdf_never_returns_an_impossible_entry(n: int) -> None:
    weights = np.zeros(n, np.float32)
    weights[[1, n // 2]] = 1.0, 3.0
    found = {u: inverse_cdf(weights, u) for u in (2.0**-53, 0.2499, 0.2501, 1.0 - 2.0**-53)}
    expected = [1, 1, n // 2, n // 2] if n > 3 else [1] * 4
    assert list(found.values()) == expected


def test_one_hot_distributions_draw_their_token() -> None:
    assert sampler().draw(Distribution.one_hot(9), position=4, purpose="draft") == 9
