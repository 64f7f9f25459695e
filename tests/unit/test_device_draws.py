"""Drafts that a device draws are those that the host would draw, from the same q; others stay with the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.device_draws import BlockDraws, drawn_block
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.executors.tensorrt_loading import engine_shapes
from dspark.executors.torch_cuda import pair_on
from dspark.models.loading import load_target
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import write_tiny_target

PAGE, V = 4, 50
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 0.9, "min_p": 0.1, "seed": 2**64 - 3},
]


def drafter_of(folder: Path, **drafter: Any) -> DSparkDrafter:
    write_tiny_target(folder / "target", max_context_len=64)
    write_tiny_drafter(folder / "drafter", folder / "target", rank=6, **drafter)
    target = load_target(folder / "target")
    made = pair_on(
        torch.device("cpu"),
        target,
        load_drafter_checkpoint(folder / "drafter", target=target.config),
        dtype="float32",
        shapes=engine_shapes(
            max_sequences=5, max_step_tokens=8, max_context_len=32, page_size=PAGE, block_size=4
        ),
        page_size=PAGE,
    ).drafter
    assert made is not None
    made.allocate_cache(num_pages=8, page_size=PAGE)
    rng, at = np.random.default_rng(0), np.arange(9, dtype=np.int32)
    made.observe(features=rng.standard_normal((9, 64)).astype(np.float32), positions=at, slots=at)
    return made


def inputs_of(asked: list[dict[str, Any]]) -> list[DraftInput]:
    found = []
    for i, params in enumerate(asked):
        sampler = TokenSampler(
            SamplingParams(**params),
            seed=params.get("seed", 100 + i),
            prompt_ids=[1, 2, 3, 4, 5],
            vocab_size=V,
            eos_ids=(),
        )
        found.append(
            DraftInput(
                sequence_id=i,
                token_ids=[1, 2, 3, 4, 5],
                max_drafts=1 + i % 4,
                sampler=sampler,
                pages=np.array([0, 1], np.int32),
            )
        )
    return found


def by_the_host(
    drafter: DSparkDrafter, inputs: list[DraftInput], monkeypatch: pytest.MonkeyPatch
) -> DraftBlock:
    with monkeypatch.context() as patch:
        patch.setattr("dspark.drafters.dspark.drawn_block", lambda *_: None)
        return drafter.propose(inputs)


@pytest.mark.parametrize(
    ("head", "more"),
    [("vanilla", {}), ("gated", {"draft_vocab": 20}), ("rnn", {"confidence": False}), ("none", {})],
)
def test_they_are_the_hosts_from_the_same_q(
    head: Any, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, inputs = drafter_of(tmp_path, head=head, **more), inputs_of(ASKED)
    monkeypatch.setattr(drafter, "_sample_block", None)  # nothing is left to it
    mine = drafter.propose(inputs)
    monkeypatch.undo()
    theirs = by_the_host(drafter, inputs, monkeypatch)
    np.testing.assert_array_equal(mine.num_tokens, [1, 2, 3, 4, 1])
    np.testing.assert_array_equal(mine.num_tokens, theirs.num_tokens)
    assert mine.distributions is not None and theirs.distributions is not None
    assert (mine.confidence_logits is None) == (theirs.confidence_logits is None)
    for row, count in enumerate(mine.num_tokens):
        np.testing.assert_array_equal(mine.tokens[row, :count], theirs.tokens[row, :count])
        if mine.confidence_logits is not None and theirs.confidence_logits is not None:
            np.testing.assert_allclose(
                mine.confidence_logits[row, :count], theirs.confidence_logits[row, :count], atol=1e-4
            )
        for a, b in zip(mine.distributions[row], theirs.distributions[row], strict=True):
            assert (a is None) == (b is None) == inputs[row].sampler.params.greedy
            if a is not None and b is not None:
                np.testing.assert_allclose(a.dense(V), b.dense(V), atol=1e-5)
                assert abs(a.probs.sum() - 1) < 1e-5 and (a.probs > 0).all()


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.3}, {"min_tokens": 5, "end_id": 3}, {"bad_words_ids": ((4,),)}]
)
def test_what_looks_at_the_text_is_the_hosts(params: dict[str, Any], tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path)
    inputs = inputs_of([*ASKED, {"temperature": 1.0} | params][1:])
    batch, num_drafts = None, np.ones(5, np.int32)
    assert drawn_block(drafter.executor, inputs, batch, num_drafts, None) is None  # type: ignore[arg-type]
    assert (drafter.propose(inputs).num_tokens > 0).all()


def test_seeds_keep_their_bits() -> None:
    draws = BlockDraws.of(item.sampler for item in inputs_of(ASKED))
    assert draws.seeds.astype(np.uint64).tolist() == [5, 101, 102, 103, 2**64 - 3]
    assert draws.coupled.tolist() == [1, 0, 0, 0, 1]
    assert draws.temperature.tolist() == pytest.approx([0.8, 1.0, 0.0, 1.3, 0.9])
