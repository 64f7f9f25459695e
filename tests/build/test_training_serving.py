"""The law that makes training worth anything: what was trained is what is served."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.executors.interface import DraftBatch
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark.models.config import TargetConfig
from dspark_build.drafter_init import export_drafter
from dspark_build.training_batch import pack
from support.training import drafter_config, drafter_model, example

PAGE_SIZE = 8
NUM_PAGES = 4


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("kind", "rank", "with_markov", "draft_vocab"),
    [
        ("vanilla", 6, True, 40),
        ("vanilla", 6, False, 61),
        ("gated", 6, True, 40),
        ("rnn", 6, True, 40),
        ("vanilla", 0, False, 40),
    ],
)
def test_training_forward_equals_serving_forward(tmp_path, kind, rank, with_markov, draft_vocab, qk_norm):
    config = drafter_config(
        markov_head_type=kind,
        markov_rank=rank,
        confidence_head_with_markov=with_markov,
        draft_vocab_size=draft_vocab,
        qk_norm=qk_norm,
        num_layers=3,
    )
    model = drafter_model(config)
    one = example(model, seed=1, num_tokens=30, prompt_len=5)
    anchors = [6, 11, 20, 25]
    packed = pack([one], [np.array(anchors)], block_size=config.block_size)
    with torch.no_grad():
        trained = model.block_pass(packed)
        trained_logits = model.logits(trained)

    target = TargetConfig(
        architecture="qwen3" if qk_norm else "llama",
        decoder=dataclasses.replace(config.decoder, num_layers=3),
        vocab_size=config.vocab_size,
        tie_word_embeddings=False,
        max_context_len=64,
    )
    export_drafter(tmp_path / "drafter", model, dict(model.named_parameters()), dtype="float32")
    served = TorchBlockDrafter(
        load_drafter_checkpoint(tmp_path / "drafter", target=target),
        target_embedding=model.frozen.embedding.numpy(),
        target_head=model.full_head.numpy(),
        dtype="float32",
    )
    served.allocate_cache(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    pages = np.array([[2, 0, 3, 1]], np.int32)
    for at, anchor in enumerate(anchors):
        positions = np.arange(anchor, dtype=np.int32)
        slots = pages[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        served.append_context(
            features=one.features[:anchor].numpy(), positions=positions, slots=slots.astype(np.int32)
        )
        block = served.draft(
            DraftBatch(
                anchors=one.tokens[[anchor]].astype(np.int32),
                anchor_positions=np.array([anchor], np.int32),
                context_len=np.array([anchor], np.int32),
                page_table=pages,
            )
        )
        np.testing.assert_allclose(block.hidden[0], trained.hidden[at], atol=1e-4)
        state = served.initial_state(1)
        for k in range(config.block_size):
            previous = packed.previous[at, k : k + 1].numpy().astype(np.int32)
            hidden = block.hidden[:, k]
            bias, state = served.head_step(previous=previous, hidden=hidden, state=state)
            logits = block.base_logits[0, k] + (0.0 if bias is None else bias[0])
            np.testing.assert_allclose(logits, trained_logits[at, k], atol=1e-4)
            confidence = served.confidence_logits(previous=previous, hidden=hidden)
            np.testing.assert_allclose(confidence[0], trained.confidence_logits[at, k], atol=1e-4)
