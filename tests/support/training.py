"""Tiny drafters and packed batches for the training tests."""

from __future__ import annotations

import numpy as np
import torch
from dspark.models.config import DecoderConfig, DrafterConfig, RopeConfig
from dspark_build.training_batch import Example, PackedBatch, pack
from dspark_build.training_model import DrafterModel, FrozenTarget

VOCAB = 61
WIDTH = 32


def drafter_config(**changes) -> DrafterConfig:
    decoder = DecoderConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_layers=changes.pop("num_layers", 2),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        qk_norm=changes.pop("qk_norm", False),
        rope=RopeConfig(theta=1000.0),
    )
    values = {
        "vocab_size": VOCAB,
        "block_size": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 3,
        "markov_rank": 6,
        "enable_confidence_head": True,
        "draft_vocab_size": 40,
    }
    return DrafterConfig(decoder=decoder, **(values | changes))


def drafter_model(
    config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> DrafterModel:
    """A model whose every parameter is random, W2 and biases included."""
    rng = np.random.default_rng(seed)
    embedding = rng.normal(0, 1, (config.vocab_size, WIDTH)).astype(np.float32)
    head = rng.normal(0, 0.4, (config.vocab_size, WIDTH)).astype(np.float32)
    mapping = np.sort(rng.permutation(config.vocab_size)[: config.draft_vocab_size]).astype(np.int32)
    frozen = FrozenTarget.build(
        embedding=embedding, head=head, draft_to_target=mapping, dtype=dtype, device=torch.device("cpu")
    )
    model = DrafterModel(config, frozen, compute_dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.full_head = torch.from_numpy(head)  # type: ignore[assignment]
    return model


def example(model: DrafterModel, *, seed: int, num_tokens: int = 24, prompt_len: int = 7) -> Example:
    rng = np.random.default_rng(seed)
    hidden = torch.from_numpy(rng.normal(0, 1, (num_tokens - prompt_len, WIDTH)).astype(np.float32))
    logits = hidden @ model.full_head.T
    m = len(model.config.target_layer_ids)
    return Example(
        tokens=rng.integers(0, model.config.vocab_size, num_tokens),
        prompt_len=prompt_len,
        features=torch.from_numpy(rng.normal(0, 1, (num_tokens - 1, m * WIDTH)).astype(np.float32)),
        target_hidden=hidden,
        target_lse=torch.logsumexp(logits, -1),
        target_argmax=logits.argmax(-1),
    )


def batch(model: DrafterModel, *, anchors: list[list[int]] | None = None, seed: int = 5) -> PackedBatch:
    anchors = anchors or [[7, 9, 12, 22], [8, 15], [10]]
    examples = [example(model, seed=seed + i, num_tokens=24 + i) for i in range(len(anchors))]
    return pack(examples, [np.array(a, np.int64) for a in anchors], block_size=model.config.block_size)
