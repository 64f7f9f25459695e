"""Laws of block verification: the target's own distribution, exactly, and never fewer accepted drafts than token by
token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from dspark.errors import NonFiniteError
from dspark.request import SamplingParams
from dspark.sampling import block_verification
from dspark.sampling.block_verification import verify_block
from dspark.sampling.distribution import Distribution
from dspark.sampling.philox import Purpose
from dspark.sampling.transforms import TokenSampler, VerificationRule
from dspark.sampling.verification import rejection_acceptance, verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import assert_distributed_as

Float64 = npt.NDArray[np.float64]
Law = Callable[[tuple[int, ...]], Float64]  # [V] behind a prefix

V = 3
DEPTH = 3
NEVER, ALWAYS = 1 - 2.0**-53, 2.0**-53


class Dial:
    """A sampler whose p are given and whose uniforms are set by hand."""

    def __init__(self, target: Law) -> None:
        self.target = target
        self.accept = [NEVER] * DEPTH

    def distribution(self, _logits: object, *, drafted: list[int]) -> Distribution:
        p = self.target(tuple(drafted))
        if np.isnan(p).any():
            raise NonFiniteError("no p here")
        kept = np.flatnonzero(p).astype(np.int32)
        return Distribution(kept, p[kept]) if len(drafted) % 2 else Distribution(None, p)

    def uniform(self, position: int, purpose: Purpose) -> float:
        return self.accept[position] if purpose is Purpose.ACCEPT else 0.5


def laws_of_a_block(
    target: Law, qs: list[Distribution | None], drafts: list[int]
) -> Iterator[tuple[int, float, Float64]]:
    """Yield what the real code does with drafts: every accepted length t, its probability and the law behind it."""
    dial, count = Dial(target), len(drafts)
    thresholds = [1.0, *(threshold_of(dial, qs, drafts, k) for k in range(1, count + 1))]
    missed = 1.0
    for t in range(count, -1, -1):
        weight, missed = missed * thresholds[t], missed * (1.0 - thresholds[t])
        if weight > 0.0:
            yield t, weight, law_behind(dial, qs, drafts, t)


def threshold_of(dial: Dial, qs: list[Distribution | None], drafts: list[int], k: int) -> float:
    """Return h_k by halving the interval of the uniform number that decides it, or exactly 0 or 1.

    1 as well where a longer run is accepted for certain: then nothing is left for k.
    """
    low, high = 0.0, 1.0
    for u in (ALWAYS, NEVER, *[None] * 48):
        tried = (low + high) / 2 if u is None else u
        dial.accept = [NEVER] * DEPTH
        dial.accept[k - 1] = tried
        taken = accepted_of(dial, qs, drafts) >= k
        if u == ALWAYS and not taken:
            return 0.0
        if u == NEVER and taken:
            return 1.0
        low, high = (tried, high) if taken else (low, tried)
    return (low + high) / 2


def accepted_of(dial: Dial, qs: list[Distribution | None], drafts: list[int]) -> int:
    return verify_block(dial, [None] * (len(drafts) + 1), drafts, qs, position=0).accepted  # type: ignore[arg-type]


def law_behind(dial: Dial, qs: list[Distribution | None], drafts: list[int], t: int) -> Float64:
    if t == len(drafts):
        return dial.target(tuple(drafts))
    seen: list[Float64] = []
    dial.accept = [NEVER] * DEPTH
    if t:
        dial.accept[t - 1] = ALWAYS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_verification, "inverse_cdf", lambda weights, _u: seen.append(weights) or 0)
        block = verify_block(dial, [None] * (len(drafts) + 1), drafts, qs, position=0)  # type: ignore[arg-type]
    assert block.accepted == t
    p = dial.distribution(None, drafted=drafts[:t])
    return Distribution(p.token_ids, seen[0] / seen[0].sum()).dense(V)


def random_law(rng: np.random.Generator, *, zeros: bool = False) -> Law:
    """A distribution of the next token behind every prefix."""
    made: dict[tuple[int, ...], Float64] = {}
    for length in range(DEPTH + 2):
        for prefix in itertools.product(range(V), repeat=length):
            weights = rng.random(V) ** 2 + 1e-3
            if zeros:
                weights[rng.integers(V)] = 0.0
            made[prefix] = weights / weights.sum()
    return made.__getitem__


def random_stop(rng: np.random.Generator) -> Callable[[tuple[int, ...]], int]:
    """A verify length that looks at drafts, but only at those in front of the one it is about."""
    goes_on = {
        prefix: rng.random() < 0.7
        for length in range(DEPTH)
        for prefix in itertools.product(range(V), repeat=length)
    }

    def stop(drafts: tuple[int, ...]) -> int:
        return next((k for k in range(DEPTH) if not goes_on[drafts[:k]]), DEPTH)

    return stop


def output_law(target: Law, draft: Law, stop: Callable[[tuple[int, ...]], int]) -> Float64:
    """Return the exact law of the first DEPTH + 1 tokens, [V] * (DEPTH + 1): one block, then plain decoding."""
    out = np.zeros((V,) * (DEPTH + 1))
    for drafts in itertools.product(range(V), repeat=DEPTH):
        drawn = float(np.prod([draft(drafts[:k])[drafts[k]] for k in range(DEPTH)]))
        if drawn == 0.0:
            continue
        kept = list(drafts[: stop(drafts)])
        qs = [one_hot_or(draft(drafts[:k])) for k in range(len(kept))]
        for t, weight, law in laws_of_a_block(target, qs, kept):
            for token in range(V):
                spread(out, target, (*kept[:t], token), drawn * weight * law[token])
    return out


def one_hot_or(q: Float64) -> Distribution | None:
    """q as the engine holds it: None for what was looked up, the others sparse."""
    kept = np.flatnonzero(q).astype(np.int32)
    return None if len(kept) == 1 else Distribution(kept, q[kept])


def spread(out: Float64, target: Law, tokens: tuple[int, ...], weight: float) -> None:
    if weight == 0.0:
        return
    if len(tokens) == out.ndim:
        out[tokens] += weight
        return
    for token, p in enumerate(target(tokens)):
        spread(out, target, (*tokens, token), weight * float(p))


def plain_law(target: Law) -> Float64:
    out = np.zeros((V,) * (DEPTH + 1))
    spread(out, target, (), 1.0)
    return out


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, DEPTH), st.booleans(), st.booleans())
def test_the_output_is_the_targets_for_every_length_exactly(
    seed: int, length: int, zeros: bool, looked_up: bool
) -> None:
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, zeros=zeros), random_law(rng)
    mixed = (
        (lambda prefix: np.eye(V)[len(prefix)] if len(prefix) != 1 else draft(prefix)) if looked_up else draft
    )
    np.testing.assert_allclose(output_law(target, mixed, lambda _: length), plain_law(target), atol=1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_the_output_is_the_targets_for_every_stopping_time_exactly(seed: int, zeros: bool) -> None:
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng), random_law(rng, zeros=zeros)
    np.testing.assert_allclose(output_law(target, draft, random_stop(rng)), plain_law(target), atol=1e-12)


def test_a_length_that_looks_at_the_token_it_is_about_bends_the_output() -> None:
    """Or the two laws above would prove nothing."""
    rng = np.random.default_rng(0)
    target, draft = random_law(rng), random_law(rng)
    bent = output_law(target, draft, lambda drafts: DEPTH if drafts[0] == 0 else 0)
    assert np.abs(bent - plain_law(target)).max() > 0.005


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_prefix_survives_with_its_joint_weight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng), random_law(rng)
    qs: list[Distribution | None] = [Distribution(None, draft((0, 0)[:k])) for k in range(2)]
    survives = np.zeros(V)
    weights = np.zeros(V)
    for x in range(V):
        weights[x] = min(1.0, target(())[x] / draft(())[x])
        for y in range(V):
            behind = [qs[0], Distribution(None, draft((x,)))]
            for t, weight, _ in laws_of_a_block(target, behind, [x, y]):
                survives[x] += draft((x,))[y] * weight * (t >= 1)
    np.testing.assert_allclose(survives, weights, atol=1e-12)


def expected_lengths(target: Law, draft: Law) -> tuple[float, float]:
    """Return the mean accepted length of block verification, by the real code, and of rejection sampling."""
    block = rejection = 0.0
    for drafts in itertools.product(range(V), repeat=DEPTH):
        q = [draft(drafts[:k])[drafts[k]] for k in range(DEPTH)]
        p = [target(drafts[:k])[drafts[k]] for k in range(DEPTH)]
        qs: list[Distribution | None] = [Distribution(None, draft(drafts[:k])) for k in range(DEPTH)]
        drawn = float(np.prod(q))
        block += drawn * sum(t * weight for t, weight, _ in laws_of_a_block(target, qs, list(drafts)))
        rejection += drawn * float(np.cumprod(np.minimum(1.0, np.array(p) / np.array(q))).sum())
    return block, rejection


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_it_never_accepts_fewer_drafts_than_rejection_sampling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block, rejection = expected_lengths(random_law(rng), random_law(rng))
    assert block >= rejection - 1e-12


def test_it_accepts_more_where_an_unlikely_draft_is_followed_by_a_likely_one() -> None:
    """The example of the paper: p = (1/3, 2/3), q = (2/3, 1/3) at both of two positions gives 11/9 against 10/9."""
    target, draft = (lambda _: np.array([1 / 3, 2 / 3, 0.0])), (lambda _: np.array([2 / 3, 1 / 3, 0.0]))
    mean = 0.0
    for drafts in itertools.product(range(2), repeat=2):
        qs: list[Distribution | None] = [Distribution(None, draft(()))] * 2
        drawn = float(np.prod([draft(())[x] for x in drafts]))
        mean += drawn * sum(t * weight for t, weight, _ in laws_of_a_block(target, qs, list(drafts)))
    assert mean == pytest.approx(11 / 9)


# -- labels ----------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, DEPTH))
def test_labels_are_the_exact_acceptance_given_the_drafts_before(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng), random_law(rng)
    drafts = [int(rng.integers(V)) for _ in range(length)]
    qs: list[Distribution | None] = [Distribution(None, draft(tuple(drafts[:k]))) for k in range(length)]
    dial = Dial(target)
    dial.accept = rng.random(DEPTH).tolist()
    rows: Any = [None] * (length + 1)
    block = verify_block(dial, rows, drafts, qs, position=0, soft_labels=True)  # type: ignore[arg-type]
    assert len(block.soft_labels) == min(block.accepted + 1, length)
    weight = 1.0
    for k, label in enumerate(block.soft_labels):
        p, q = target(tuple(drafts[:k])), draft(tuple(drafts[:k]))
        assert label == pytest.approx(np.minimum(weight * p, q).sum() / weight)
        weight = min(1.0, weight * p[drafts[k]] / q[drafts[k]])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_label_of_a_draft_that_was_cut_off_is_that_of_a_longer_block(length: int) -> None:
    rng = np.random.default_rng(length)
    target = rng.normal(size=(4, 4)).astype(np.float32)
    draft = (target + rng.normal(size=(4, 4))).astype(np.float32)
    seen = 0
    for seed in range(80):
        sampler = request_sampler({"temperature": 1.0}, seed)
        drafts, qs = draft_chain(sampler, draft, "drawn", length + 1, 1, 0)
        rows = target[[0, *drafts]]
        verdict = verify_chain(
            sampler,
            rows[: length + 1],
            None,
            drafts[:length],
            qs[:length],
            position=1,
            soft_labels=True,
            cut_off=(drafts[length], qs[length]),
        )
        if verdict.accepted < length:
            continue
        weight = 1.0
        for k, q in enumerate(qs):
            p = sampler.distribution(rows[k], drafted=drafts[:k]).dense(4)
            dense = (q or Distribution.one_hot(drafts[k])).dense(4)
            label = np.minimum(weight * p, dense).sum() / weight
            weight = min(1.0, weight * p[drafts[k]] / dense[drafts[k]])
        assert verdict.soft_labels is not None and verdict.soft_labels[length] == pytest.approx(label)
        seen += 1
    assert seen > 10


# -- through `verify_chain`, with the noise of a request ---------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "bad_words": {"bad_words_ids": ((1,), (0, 2)), "min_tokens": 2},
}


def request_sampler(params: dict[str, Any], seed: int) -> TokenSampler:
    made = SamplingParams(**params)
    return TokenSampler(made, seed=seed, prompt_ids=[0], vocab_size=4, eos_ids=[3], rule="block")


def draft_chain(
    sampler: TokenSampler, logits_after: np.ndarray, kind: str, num_drafts: int, position: int, anchor: int
) -> tuple[list[int], list[Distribution | None]]:
    drafts: list[int] = []
    qs: list[Distribution | None] = []
    for k in range(num_drafts):
        logits = logits_after[([anchor, *drafts])[-1]]
        if kind == "mixed" and k % 2 == 0:
            q, token_id = None, int(logits.argmax())
        else:
            q = sampler.distribution(logits, drafted=drafts)
            token_id = sampler.draw(q, position=position + k, purpose=Purpose.DRAFT)
        drafts.append(token_id)
        qs.append(q)
    return drafts, qs


@pytest.mark.parametrize(("kind", "labelled"), [("drawn", True), ("mixed", False)])
@pytest.mark.parametrize("name", PARAMS)
def test_the_first_three_tokens_are_distributed_as_plain_ones(name: str, kind: str, labelled: bool) -> None:
    rng = np.random.default_rng(3)
    target = (rng.normal(size=(4, 4)) * 1.5).astype(np.float32)
    draft = (0.4 * target + 0.8 * rng.normal(size=(4, 4))).astype(np.float32)
    counts = np.zeros((4, 4, 4))
    for seed in range(2500):
        sampler, output = request_sampler(PARAMS[name], seed), [0]
        while len(output) < 4:
            # Four drafts, of which three are verified; what is not accepted is drafted again from the next anchor.
            position = len(output)
            drafts, qs = draft_chain(sampler, draft, kind, 4, position, output[-1])
            verdict = verify_chain(
                sampler,
                target[[output[-1], *drafts[:3]]],
                None,
                drafts[:3],
                qs[:3],
                position=position,
                soft_labels=labelled,
                cut_off=(drafts[3], qs[3]) if labelled else None,
            )
            sampler.commit(verdict.token_ids)
            output += verdict.token_ids
            if labelled:
                assert verdict.soft_labels is not None and len(verdict.soft_labels) == verdict.accepted + 1
        counts[tuple(output[1:4])] += 1
    assert_distributed_as(counts, triple_probs(target, PARAMS[name]))


def triple_probs(logits_after: np.ndarray, params: dict[str, Any]) -> Float64:
    sampler = request_sampler(params, 0)
    out = np.zeros((4, 4, 4))
    for x, y in itertools.product(range(4), repeat=2):
        first = sampler.distribution(logits_after[0]).dense(4)[x]
        second = sampler.distribution(logits_after[x], drafted=[x]).dense(4)[y]
        out[x, y] = first * second * sampler.distribution(logits_after[y], drafted=[x, y]).dense(4)
    return out


def test_a_single_draft_and_drafts_that_were_looked_up_are_verified_token_by_token() -> None:
    rng = np.random.default_rng(5)
    target = rng.normal(size=(4, 4)).astype(np.float32)
    for seed in range(60):
        sampler = request_sampler({}, seed)
        drafts, qs = draft_chain(sampler, target + 0.5, "drawn", 1, 1, 0)
        rows = target[[0, *drafts]]
        block = verify_block(sampler, rows, drafts, qs, position=1, soft_labels=True)
        verdict = verify_chain(sampler, rows, None, drafts, qs, position=1, soft_labels=True)
        assert verdict.accepted == block.accepted
        assert verdict.soft_labels == pytest.approx(block.soft_labels)
        assert verdict.soft_labels == pytest.approx(
            [rejection_acceptance(sampler.distribution(rows[0]), qs[0] or Distribution.one_hot(drafts[0]))]
        )
        if block.replacement is not None:
            assert verdict.token_ids == (block.replacement,)
    unread = np.full((4, 4), np.nan, np.float32)
    unread[0] = [-50.0, 50.0, 0.0, 0.0]
    assert verify_chain(request_sampler({}, 4), unread, None, [0, 1, 1], None, position=1).token_ids == (1,)


# -- rows that cannot be read ----------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_ends_the_block_for_who_gets_there_alone() -> None:
    p, q = np.array([0.3, 0.5, 0.2]), Distribution(None, np.array([0.6, 0.2, 0.2]))

    def target(prefix: tuple[int, ...]) -> Float64:
        return p if len(prefix) < 2 else np.full(V, np.nan)

    rows: Any = [None] * 4
    dial = Dial(target)
    dial.accept = [NEVER, 0.499, ALWAYS]  # w_2 = 0.3 / 0.6 * 0.2 / 0.2
    block = verify_block(dial, rows, [0, 2, 1], [q, q, q], position=0)  # type: ignore[arg-type]
    assert (block.accepted, block.replacement) == (2, None)
    dial.accept = [NEVER, 0.501, ALWAYS]
    assert verify_block(dial, rows, [0, 2, 1], [q, q, q], position=0).accepted == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["block", "rejection", "greedy", "coupled"])
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_drafts_accepted_up_to_an_unreadable_row_are_committed(rule: VerificationRule, bad: int) -> None:
    logits = np.tile(np.array([0.0, 1.0, 2.0, 0.0], np.float32), (4, 1))
    made = SamplingParams(temperature=0.0 if rule == "greedy" else 1.0)
    sampler = TokenSampler(made, seed=7, prompt_ids=[0], vocab_size=4, eos_ids=[3], rule=rule)
    drafts: list[int] = []
    qs: list[Distribution | None] = []
    for k in range(3):  # from the target itself: always accepted
        if rule in ("block", "rejection"):
            qs.append(sampler.distribution(logits[k], drafted=drafts))
            drafts.append(
                sampler.draw(qs[-1] or Distribution.one_hot(0), position=1 + k, purpose=Purpose.DRAFT)
            )
        else:
            qs.append(None)
            drafts.append(sampler.sample(logits[k], position=1 + k, drafted=drafts))
    logits[bad:] = np.nan
    verdict = verify_chain(sampler, logits, None, drafts, qs, position=1, soft_labels=True)
    assert (verdict.accepted, verdict.token_ids) == (bad - 1, tuple(drafts[:bad]))


def test_the_row_behind_the_anchor_must_be_readable() -> None:
    nothing: Any = [None] * 3
    q = Distribution(None, np.full(V, 1 / V))
    with pytest.raises(NonFiniteError):
        verify_block(Dial(lambda _: np.full(V, np.nan)), nothing, [0, 1], [q, q], position=0)  # type: ignore[arg-type]


def test_rows_behind_a_draft_that_p_forbids_are_never_read() -> None:
    q = Distribution(None, np.full(V, 1 / V))

    def target(prefix: tuple[int, ...]) -> Float64:
        assert len(prefix) < 2, "nothing is accepted behind it"
        return np.array([0.5, 0.5, 0.0])

    dial = Dial(target)
    dial.accept = [ALWAYS] * DEPTH
    block = verify_block(dial, [None] * 4, [0, 2, 1], [q, q, q], position=0)  # type: ignore[arg-type,list-item]
    assert block.accepted == 1 and block.replacement in (0, 1)


def test_drafts_from_the_target_itself_are_always_accepted() -> None:
    p = np.full(V, 1 / V)
    dial = Dial(lambda _: p)
    qs: list[Distribution | None] = [Distribution(None, p)] * 3
    assert accepted_of(dial, qs, [2, 0, 1]) == 3
