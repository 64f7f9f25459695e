"""Log probabilities are the target's own: the same with and without speculation, none behind the stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dspark.engine.log_probs import token_log_probs
from dspark.request import Request, RequestOutput, TokenLogProb
from support.engines import make_engine, make_request
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

PROMPTS = [[3, 5, 7], [1], [9, 4, 9, 4, 9, 4, 9, 4, 9]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    write_good_drafter(folder, target)
    return str(folder)


def told(
    engine: object, prompts: list[list[int]], **params: object
) -> list[tuple[list[int], list[TokenLogProb]]]:
    """Run the prompts together; return token ids and log probabilities of each."""
    outputs: list[list[RequestOutput]] = [[] for _ in prompts]
    for prompt, received in zip(prompts, outputs, strict=True):
        asked = make_request(prompt, **params)
        engine.add(Request(prompt_ids=asked.prompt_ids, params=asked.params, emit=received.append))  # type: ignore[attr-defined]
    while engine.step():  # type: ignore[attr-defined]
        pass
    for received in outputs:
        assert received[-1].error is None
        assert all(len(o.token_ids) == len(o.log_probs) for o in received)
    return [
        ([t for o in received for t in o.token_ids], [e for o in received for e in o.log_probs])
        for received in outputs
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4},
        {"temperature": 1.5, "seed": 9, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    ],
)
def test_speculation_does_not_change_log_probabilities(
    target: Path, drafter: str, sampling: dict[str, object]
) -> None:
    asked = {"logprobs": 5, "max_tokens": 30, **sampling}
    plain = told(make_engine(target), PROMPTS, **asked)
    engine = make_engine(target, drafter=drafter, policy="fixed:4")
    speculative = told(engine, PROMPTS, **asked)
    assert engine.stats().num_accepted_tokens > 10
    for (ids, entries), (other_ids, others) in zip(plain, speculative, strict=True):
        assert ids == other_ids
        for entry, other in zip(entries, others, strict=True):
            assert entry.log_prob == pytest.approx(other.log_prob, abs=2e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]


def test_they_are_those_of_the_model_before_every_transform(target: Path) -> None:
    greedy = told(make_engine(target), PROMPTS[:1], logprobs=1, max_tokens=10)[0][1]
    assert all(entry.rank == 1 and entry.top[0][1] == entry.log_prob for entry in greedy)
    # The first token after the same prompt has the same alternatives whatever the sampling is.
    altered = told(
        make_engine(target), PROMPTS[:1], logprobs=1, max_tokens=1, temperature=0.2, top_k=1, seed=1
    )[0][1]
    assert altered[0].top == greedy[0].top


def test_nothing_is_told_of_tokens_behind_the_stop(target: Path, drafter: str) -> None:
    (ids, _), *_ = told(make_engine(target), PROMPTS[:1], max_tokens=40, return_log_probs=True)
    engine = make_engine(target, drafter=drafter, policy="fixed:4")
    for end_id in sorted(set(ids))[:6]:
        (cut, entries), *_ = told(
            engine, PROMPTS[:1], max_tokens=40, return_log_probs=True, ignore_eos=False, end_id=end_id
        )
        assert cut == ids[: ids.index(end_id) + 1] and len(entries) == len(cut)


def test_who_does_not_ask_is_told_nothing(target: Path) -> None:
    engine, outputs = make_engine(target), []
    engine.add(Request(prompt_ids=(1, 2), params=make_request([1]).params, emit=outputs.append))
    while engine.step():
        pass
    assert outputs and all(output.log_probs == () for output in outputs)


def test_entries_against_a_plain_softmax() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (3, 40)).astype(np.float32)
    logits[1, 7] = logits[1, 3]  # a tie
    probs = np.exp(logits.astype(np.float64))
    expected = np.log(probs / probs.sum(axis=1, keepdims=True))
    entries = token_log_probs(logits, (4, 7, 0), num_alternatives=40)
    for row, (token, entry) in enumerate(zip((4, 7, 0), entries, strict=True)):
        assert entry.log_prob == pytest.approx(expected[row, token])
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        order = sorted(range(40), key=lambda one: (-logits[row, one], one))
        assert [token for token, _ in entry.top] == order
        assert np.exp([value for _, value in entry.top]).sum() == pytest.approx(1.0)
    assert token_log_probs(logits, (4,), num_alternatives=0)[0].top == ()
    few = token_log_probs(logits, (4,), num_alternatives=3)[0].top
    assert few == entries[0].top[:3]
