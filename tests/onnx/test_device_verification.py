"""Chains verified in the target's graph: what the host would say, token by token; logits stay where they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspark.drafters.device_draws import BlockDraws, KeptRow
from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.engine.learning import exact_labels
from dspark.engine.verifying import device_verdict
from dspark.errors import NonFiniteError
from dspark.executors.interface import StepBatch, Verified
from dspark.executors.tensorrt_session import Call
from dspark.executors.tensorrt_target import TensorRTTarget
from dspark.executors.verifying import VerifyBatch
from dspark.generate import complete_all
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import Verdict, verify_chain
from support.engines import make_request, run
from support.step_batches import ragged_step

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.exported_pairs import LIMITS, PAGE, Home

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6], [7, 7, 1]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "max_tokens": 11},
    {"temperature": 1.0, "top_p": 0.9, "seed": 6},
    {"temperature": 0.7, "top_k": 5, "seed": 7, "max_tokens": 9},
    {"temperature": 1.3, "min_p": 0.05, "seed": 8},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("verified"))


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("reduced"), random=True, draft_vocab=20)


class Watched:
    """An engine whose target's calls are counted by what they brought back."""

    def __init__(
        self, home: Home, *, rule: Any = "auto", policy: str = "fixed:3", host: bool = False
    ) -> None:
        self.engine = home.engine(policy, rule)
        target: Any = self.engine.target
        assert isinstance(target, TensorRTTarget) and target.longest_chain == 16
        if host:
            target.longest_chain = 0
        self.calls: Counter[str] = Counter()
        session, run_call = target._runner.session, target._runner.session.run

        def watched(call: Call) -> None:
            self.calls["verified" if "logits" not in call.outputs else "logits"] += 1
            run_call(call)

        session.run = watched  # type: ignore[method-assign]

    def answers(self, params: list[dict[str, Any]]) -> list[list[int]]:
        requests = [make_request(p, **more) for p, more in zip(PROMPTS, params, strict=False)]
        return [completion.token_ids for completion in run(self.engine, requests)]


@pytest.mark.parametrize(
    ("policy", "vocabulary", "rule"),
    [
        ("none", "home", "auto"),
        ("fixed:3", "home", "block"),
        ("fixed:3", "reduced", "auto"),
        ("fixed:3", "reduced", "block"),
    ],
)
def test_answers_are_those_of_verification_on_the_host(
    rule: str, vocabulary: str, policy: str, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(vocabulary)
    device, host = (Watched(made, rule=rule, policy=policy, host=on_host) for on_host in (False, True))
    assert device.answers(PARAMS) == host.answers(PARAMS)
    assert set(host.calls) == {"logits"}
    # A pass without anything to draw from (a prompt that goes on) is not verified.
    assert device.calls["verified"] > 5 * device.calls["logits"]
    mine, theirs = device.engine.stats(), host.engine.stats()
    assert (mine.num_draft_tokens, mine.num_accepted_tokens) == (
        theirs.num_draft_tokens,
        theirs.num_accepted_tokens,
    )
    assert (mine.num_accepted_tokens > 0) == (policy != "none")
    assert mine.num_drafter_faults == 0


@pytest.mark.parametrize(
    "altered",
    [
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3},
        {"logprobs": 2},
        {"min_tokens": 6, "stop_token_ids": (49,)},
    ],
)
def test_a_step_with_a_request_that_only_the_host_knows_is_verified_there(
    altered: dict[str, Any], home: Home
) -> None:
    params = [*PARAMS[:3], {"max_tokens": 6} | altered]
    device, host = (Watched(home, rule="block", host=on_host) for on_host in (False, True))
    assert device.answers(params) == host.answers(params)
    # First with it, on the host; then without, on the device: q of sampled drafts is read in both places.
    assert device.calls["logits"] >= 2 and device.calls["verified"] >= 2


def sampler_of(draws: BlockDraws, i: int, *, committed: int) -> TokenSampler:
    params = {name: float(getattr(draws, name)[i]) for name in ("temperature", "top_p", "min_p")}
    request = make_request([1], **params, top_k=int(draws.top_k[i]), seed=int(draws.seeds[i]))
    return TokenSampler(
        request.params,
        seed=int(draws.seeds[i]),
        prompt_ids=[1] * committed,
        vocab_size=50,
        eos_ids=(),
        rule="coupled" if draws.coupled[i] else "block",
    )


def test_every_sequence_of_a_ragged_pass_is_verified_by_its_own_rule(home: Home) -> None:
    rng = np.random.default_rng(0)
    target = home.pair().target
    target.allocate_cache(num_pages=LIMITS.num_pages, page_size=PAGE)
    accepted = []
    for seed in range(12):
        batch = ragged_step(rng, [4, 1, 3], [0, 0, 0], page_size=PAGE, max_pages=4)
        logits = target.forward(batch).logits
        tokens = batch.tokens.copy()
        for t in (1, 2, 5, 6):  # drafts that are likely, so that chains are accepted as far as they are long
            tokens[t] = logits[t - 1].argmax() if rng.random() < 0.8 else tokens[t]
            batch = replaced(batch, tokens)
            logits = target.forward(batch).logits
        draws = BlockDraws(
            seeds=np.array([seed, 90 + seed, 7 * seed], np.int64),
            temperature=np.array([0.0, 0.9, 0.7], np.float32),
            top_k=np.array([0, 0, 9], np.int32),
            top_p=np.array([1, 0.5, 1], np.float32),
            min_p=np.zeros(3, np.float32),
            coupled=np.array([0, seed % 2, seed % 2], np.int32),
        )
        verify = VerifyBatch(
            row_start=batch.query_start,
            first_positions=np.array([1, 1, 1], np.int32),
            prob_rows=np.full(8, -1, np.int32),
            draws=draws,
        )
        output = target.forward_verified(batch, verify)
        assert output.verified is not None and output.logits.shape == (0, 50) and output.finite.all()
        np.testing.assert_array_equal(output.features, target.forward(batch).features)
        for i in range(3):
            span = slice(*batch.query_start[i : i + 2])
            drafts = tokens[span][1:].tolist()
            wanted = verify_chain(
                sampler_of(draws, i, committed=1), logits[span], None, drafts, None, position=1
            )
            got = output.verified
            assert (int(got.accepted[i]), int(got.next_token[i])) == (wanted.accepted, wanted.token_ids[-1])
            accepted.append(wanted.accepted)
    assert max(accepted) >= 2 and 0 in accepted


def replaced(batch: StepBatch, tokens: Any) -> StepBatch:
    fields = {name: getattr(batch, name) for name in StepBatch.__dataclass_fields__}
    return StepBatch(**fields | {"tokens": tokens})


def test_probabilities_that_are_still_wanted_outlive_the_next_call(home: Home) -> None:
    drafter = home.pair().drafter
    assert drafter is not None
    drafter.allocate_cache(num_pages=LIMITS.num_pages, page_size=PAGE)

    def draft(seed: int) -> DraftBlock:
        item = make_request([4, 2], temperature=1.0, seed=seed)
        sampler = TokenSampler(item.params, seed=seed, prompt_ids=[4, 2], vocab_size=50, eos_ids=())
        pages = np.arange(3, dtype=np.int32)
        return drafter.propose(
            [DraftInput(sequence_id=1, token_ids=[4, 2], max_drafts=4, sampler=sampler, pages=pages)]
        )

    first = draft(1)
    assert first.distributions is not None
    row = first.distributions[0]
    assert isinstance(row, KeptRow) and row.probs.on_device
    again = draft(1)  # the same call: what it drew from is what the first one did
    assert not row.probs.on_device
    assert again.distributions is not None
    draft(99)
    for mine, theirs in zip(row, again.distributions[0], strict=True):
        assert mine is not None and theirs is not None
        np.testing.assert_array_equal(mine.probs, theirs.probs)
        assert abs(mine.probs.sum() - 1) < 1e-5
    assert [q is None for q in row[1:3]] == [False, False]


def test_rows_that_are_not_finite_end_what_is_used() -> None:
    class Sequence:
        token_ids = (1, 2)
        sampler = sampler_of(BlockDraws.arg_max(1), 0, committed=2)

    sequence: Any = Sequence()

    def verdict(accepted: int, token: int, finite: list[bool]) -> Verdict:
        verified = Verified(accepted=np.array([accepted], np.int32), next_token=np.array([token], np.int32))
        return device_verdict(sequence, verified, 0, finite=np.array(finite), drafts=[5, 6, 7])

    assert verdict(3, 9, [True] * 4) == Verdict(3, (5, 6, 7, 9))
    assert verdict(1, 9, [True, True, False, True]) == Verdict(1, (5, 9))
    # The walk stopped at the row that is not finite: what a good row accepted last is the token that is added.
    assert verdict(2, -1, [True, True, False, True]) == Verdict(1, (5, 6))
    assert verdict(1, -1, [True, False, False, True]) == Verdict(0, (5,))
    with pytest.raises(NonFiniteError, match="NaN or infinite logits at position 2; the request ends here"):
        verdict(0, -1, [False, True, True, True])


def test_a_drawn_draft_that_was_cut_off_is_not_judged_by_a_token_drawn_apart_from_it() -> None:
    class Sequence:
        token_ids = (1, 2)
        sampler = sampler_of(
            replace(BlockDraws.arg_max(1), temperature=np.ones(1, np.float32)), 0, committed=2
        )

    sequence: Any = Sequence()
    verified = Verified(accepted=np.zeros(1, np.int32), next_token=np.array([5], np.int32))
    verdict = device_verdict(sequence, verified, 0, finite=np.array([True]), drafts=[])
    block: Any = SimpleNamespace(tokens=np.array([[5, 6]], np.int32), num_tokens=np.array([2], np.int32))
    rows: Any = SimpleNamespace(verify_len=np.zeros(1, np.int32))
    labels = exact_labels(block, rows, [verdict])
    assert labels is not None and np.isnan(labels).all()


def test_a_request_whose_rows_are_not_finite_ends_as_on_the_host(home: Home) -> None:
    found = []
    for host in (False, True):
        engine = Watched(home, host=host).engine
        target: Any = engine.target
        plain = target._run

        def poisoned(batch: StepBatch, *rest: Any, plain: Any = plain) -> Any:
            got = plain(batch, *rest)
            if len(batch.context_len) == 2 and batch.context_len[0] > 8:
                got["finite"][0] = 0
            return got

        target._run = poisoned
        requests = [make_request([3, 1, 4]), make_request([9, 2], temperature=1.0, seed=4)]
        found.append([(one.token_ids, str(one.error)) for one in complete_all(engine, requests)])
    assert found[0] == found[1]
    assert "NaN or infinite logits" in found[0][0][1] and found[0][1][1] == "None"
