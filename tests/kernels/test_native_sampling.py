"""Drawing drafts in native code: the tokens, and up to rounding the q, that single steps and the sampler draw."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.executors.native_drafter import NativeBlockDrafter
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark_plugins.native import native_available, native_unavailable_reason
from dspark_plugins.native.binding import ISAS, NativeError, NativeHead, Pool
from support.memory_limit import address_space, alone
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import tiny_config

pytestmark = pytest.mark.skipif(
    not native_available(), reason=f"no native code: {native_unavailable_reason()}"
)

TARGET = tiny_config(tie=True)
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"head": "vanilla"},
    "rnn_reduced": {"head": "rnn", "draft_vocab": 30, "small_w1": True},
    "no_head": {"head": "none", "draft_vocab": 20},
    "greedy_rated": {"head": "vanilla", "draft_vocab": 30, "small_w1": True, "greedy_confidence": True},
}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 4},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-30},
)
PAGE_SIZE = 4
ROW = np.dtype(  # DSparkSampling
    [
        *(("seed", np.int64), ("top_p", np.float64), ("scale", np.float32), ("min_log", np.float32)),
        *((name, np.int32) for name in ("top_k", "coupled", "position", "num_committed")),
    ]
)


class SingleSteps:
    """The native executor without its fused calls."""

    def __init__(self, executor: NativeBlockDrafter) -> None:
        self.config, self.name = executor.config, executor.name
        self.draft, self.head_step = executor.draft, executor.head_step
        self.initial_state, self.confidence_logits = executor.initial_state, executor.confidence_logits
        self.greedy_confidence = executor.greedy_confidence


def drafter_of(folder: Path, kind: str) -> tuple[DSparkDrafter, DSparkDrafter]:
    """Return the drafter that draws in native code and the one that draws token by token."""
    write_tiny_drafter(folder / kind, TARGET, **KINDS[kind])
    checkpoint = load_drafter_checkpoint(folder / kind, target=TARGET)
    given = np.random.default_rng(5).standard_normal((50, 32)).astype(np.float32)
    native = NativeBlockDrafter(
        checkpoint, dtype="bfloat16", target_embedding=given, target_head=given, num_threads=2
    )
    native.allocate_cache(num_pages=40, page_size=PAGE_SIZE)
    features = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    positions = np.arange(40, dtype=np.int32)
    native.append_context(features=features, positions=positions, slots=positions)
    steps: Any = SingleSteps(native)
    return DSparkDrafter(native, checkpoint.draft_to_target), DSparkDrafter(steps, checkpoint.draft_to_target)


def asked(index: int, *, named: bool, max_drafts: int = 4, **params: Any) -> DraftInput:
    prompt = [(7 * index + 3 * j) % 50 for j in range(9 + index % 4)]
    sampler = TokenSampler(
        SamplingParams(max_tokens=64, seed=index if named else None, **params),
        seed=(index * 0x9E3779B97F4A7C15) % 2**64,
        prompt_ids=prompt,
        vocab_size=50,
        eos_ids=[2],
    )
    pages = np.arange(10, dtype=np.int32)
    return DraftInput(
        sequence_id=index, token_ids=prompt, max_drafts=max_drafts, sampler=sampler, pages=pages
    )


def inputs_of(count: int) -> list[DraftInput]:
    kinds = itertools.cycle(itertools.product(WAYS, (True, False)))
    chosen = itertools.islice(kinds, count)
    return [asked(i, named=named, max_drafts=1 + i % 4, **way) for i, (way, named) in enumerate(chosen)]


def drafts(block: DraftBlock) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(block.tokens, block.num_tokens, strict=True)]


def assert_close_q(left: DraftBlock, right: DraftBlock) -> None:
    assert left.distributions is not None and right.distributions is not None
    for ours, theirs in zip(left.distributions, right.distributions, strict=True):
        assert len(ours) == len(theirs)
        for mine, wanted in zip(ours, theirs, strict=True):
            assert (mine is None) == (wanted is None)
            if mine is not None and wanted is not None:
                np.testing.assert_allclose(mine.dense(50), wanted.dense(50), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_what_single_steps_and_the_sampler_draw(tmp_path: Path, kind: str) -> None:
    native, single = drafter_of(tmp_path, kind)
    inputs = inputs_of(84)
    ours, theirs = native.propose(inputs), single.propose(inputs)
    assert drafts(ours) == drafts(theirs)
    assert_close_q(ours, theirs)
    assert ours.confidence_logits is not None and theirs.confidence_logits is not None
    for row, count in enumerate(ours.num_tokens):
        mine, wanted = (block.confidence_logits[row, :count] for block in (ours, theirs))
        if kind == "greedy_rated" and inputs[row].sampler.params.greedy:  # other sums of exponentials
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(mine, wanted)


def test_drafts_of_greedy_requests_alone_are_rated_by_their_own_probability(tmp_path: Path) -> None:
    rated, _ = drafter_of(tmp_path / "rated", "greedy_rated")
    plain, _ = drafter_of(tmp_path / "plain", "greedy_rated")
    plain.executor.greedy_confidence = None
    plain = DSparkDrafter(SingleSteps(plain.executor), plain.draft_to_target)  # type: ignore[arg-type]
    inputs = inputs_of(28)
    ours, theirs = rated.propose(inputs), plain.propose(inputs)
    assert ours.confidence_logits is not None and theirs.confidence_logits is not None
    for row, (item, count) in enumerate(zip(inputs, ours.num_tokens, strict=True)):
        same = np.equal(ours.confidence_logits[row, :count], theirs.confidence_logits[row, :count])
        assert (not same.any()) if item.sampler.params.greedy else same.all()


def test_every_draft_lies_in_the_q_that_is_told(tmp_path: Path) -> None:
    native, _ = drafter_of(tmp_path, "rnn_reduced")
    block = native.propose(inputs_of(84))
    assert block.distributions is not None
    for tokens, row in zip(drafts(block), block.distributions, strict=True):
        for token, q in zip(tokens, row, strict=True):
            if q is not None:
                assert q.prob(token) > 0.0 and abs(q.probs.sum() - 1.0) < 1e-12


def same_bits(block: DraftBlock, row: int, alone: DraftBlock) -> bool:
    def bits(of: DraftBlock, at: int) -> list[bytes | None]:
        if of.distributions is None:
            return [None] * int(of.num_tokens[at])
        found = of.distributions[at]
        return [None if q is None else q.dense(50).tobytes() for q in found]

    assert block.confidence_logits is not None and alone.confidence_logits is not None
    count = int(block.num_tokens[row])
    rated = block.confidence_logits[row, :count], alone.confidence_logits[0, :count]
    return (
        drafts(block)[row] == drafts(alone)[0]
        and bits(block, row) == bits(alone, 0)
        and np.array_equal(*rated)
    )


@pytest.mark.parametrize("kind", ["vanilla", "greedy_rated"])
def test_drafts_and_q_do_not_depend_on_the_batch(tmp_path: Path, kind: str) -> None:
    native, _ = drafter_of(tmp_path, kind)
    altered = [
        asked(90, named=True, temperature=1.0, repetition_penalty=1.3),
        asked(91, named=False, temperature=0.8, frequency_penalty=0.5),
    ]
    inputs = [*inputs_of(14), *altered]
    for order in (inputs, inputs[::-1], inputs[5:]):
        together = native.propose(order)
        for row, item in enumerate(order):
            assert same_bits(together, row, native.propose([item])), item.sampler.params


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_a_large_vocabulary(isa: str, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_NATIVE_ISA", isa)
    rng = np.random.default_rng(3)
    vocab, size = 9001, 3001 if reduced else 9001
    ids = np.sort(rng.permutation(vocab)[:size]).astype(np.int32) if reduced else None
    head = plain_head(size, ids)
    ways: list[tuple[dict[str, Any], bool]] = list(itertools.product(WAYS[:-1], (True, False)))
    ways += [({"temperature": 1.0, "top_k": 700}, True), ({"temperature": 0.9, "top_p": 0.9999}, False)]
    rows = (3.0 * rng.standard_normal((len(ways), 2, size))).astype(np.float32)
    samplers = [large_sampler(i, vocab, named, way) for i, (way, named) in enumerate(ways)]
    probs, entries = np.empty(rows.shape), np.empty(rows.shape, np.int32)
    tokens, finite, _, count = head.sample(
        np.zeros(len(ways), np.int32),
        np.zeros((len(ways), 2, 4), np.float32),
        rows.copy(),
        native_rows(samplers),
        probs,
        entries,
        with_confidence=False,
    )
    assert finite.all()
    for i, sampler in enumerate(samplers):
        for k in range(2):
            wanted = sampler.distribution(rows[i, k], token_ids=ids)
            token = sampler.draw(wanted, position=3 + k, purpose="draft")
            assert tokens[i, k] == token, sampler.params
            if sampler.params.greedy:
                assert count[i, k] == 0
                continue
            kept = np.arange(size) if count[i, k] == size else entries[i, k, : count[i, k]]
            q = np.zeros(vocab)
            q[kept if ids is None else ids[kept]] = probs[i, k, : count[i, k]]
            np.testing.assert_allclose(q, wanted.dense(vocab), rtol=1e-12, atol=1e-300)


def plain_head(size: int, ids: npt.NDArray[np.int32] | None) -> NativeHead:
    return NativeHead(
        Pool(2),
        kind="none",
        hidden_size=4,
        draft_vocab_size=size,
        w1=None,
        w2=None,
        mix=None,
        mix_bias=None,
        confidence=None,
        confidence_bias=0.0,
        previous_to_row=None,
        draft_to_target=ids,
    )


def large_sampler(index: int, vocab: int, named: bool, way: dict[str, Any]) -> TokenSampler:
    params = SamplingParams(max_tokens=8, seed=index if named else None, **way)
    return TokenSampler(params, seed=index + 11, prompt_ids=[1, 2, 3], vocab_size=vocab, eos_ids=[0])


def native_rows(samplers: Sequence[TokenSampler]) -> npt.NDArray[np.void]:
    found = np.empty(len(samplers), ROW)
    for row, sampler in zip(found, samplers, strict=True):
        p = sampler.params
        row["seed"], row["top_p"], row["top_k"] = sampler.seed, p.top_p, p.top_k
        row["scale"] = 0.0 if p.greedy else 1.0 / p.temperature
        row["min_log"] = np.log(p.min_p) if p.min_p else -np.inf
        row["coupled"], row["position"], row["num_committed"] = sampler.rule == "coupled", 3, 3
    return found


@alone
def test_memory_that_a_worker_lacks_is_told_to_the_caller_and_the_head_draws_on() -> None:
    size = 3_000_000
    head = plain_head(size, None)
    logits = np.zeros((2, 1, size), np.float32)
    logits[:, 0, 7] = 40.0
    probs, entries = np.ones(logits.shape), np.ones(logits.shape, np.int32)
    rows = np.zeros(2, ROW)
    rows["top_p"], rows["scale"], rows["min_log"] = 1.0, 1.0, -np.inf

    def draw() -> list[list[int]]:
        hidden, anchors = np.zeros((2, 1, 4), np.float32), np.zeros(2, np.int32)
        return head.sample(anchors, hidden, logits, rows, probs, entries, with_confidence=False)[0].tolist()

    with address_space(1 << 20), pytest.raises(NativeError, match="no memory for the lists of a pass"):
        draw()
    assert draw() == [[7], [7]]
