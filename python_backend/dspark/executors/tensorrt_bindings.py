"""Every tensor that goes into and comes out of the two engines, by name, type and shape: for the exporter, the engine
builder and the runtime alike.

Dimensions are numbers or the names of `DIMENSIONS`; a name has one size within a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dspark.models.config import DrafterConfig, TargetConfig

__all__ = [
    "CALIBRATION_SHAPE",
    "DIMENSIONS",
    "DTYPE_NAMES",
    "ITEM_BYTES",
    "KEPT",
    "PAIRED",
    "TABLE_SUFFIX",
    "VERIFY_DEPTH",
    "Binding",
    "DType",
    "Kind",
    "Precision",
    "SampleHead",
    "VerifyShape",
    "drafter_bindings",
    "head_precision",
    "numpy_dtype",
    "resolved_shape",
    "shared_tables",
    "target_bindings",
]

Precision = Literal["fp32", "fp16", "bf16"]
DType = Literal["fp32", "fp16", "bf16", "i32", "i64"]
Kind = Literal["input", "output", "cache", "weight", "link"]

ITEM_BYTES: dict[DType, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "i32": 4, "i64": 8}
DTYPE_NAMES: dict[Precision, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}  # as in settings
# What the drafter's engine leaves in device memory that the target's reads.
PAIRED = frozenset({"draft_probs", "draft_tokens", "num_tokens", "confidence_logits"})
KEPT = "draft_probs"  # of them, what is copied to the host only when somebody there looks
CALIBRATION_SHAPE = (3, 5)  # kinds of traffic, numbers of the map from a confidence logit to a probability
VERIFY_DEPTH = 16  # drafts of the longest chain that a target engine verifies
TABLE_SUFFIX = ".table"  # of the file of a weight that both engines take as an input
DIMENSIONS = {
    "T": "rows of a target pass",
    "R": "sequences",
    "P": "pages of a sequence",
    "M": "rows whose logits are wanted",
    "W": "mask words of a row, 0 for chains",
    "N": "newly committed rows",
    "S": "cache slots",
    "Q": "rows of draft probabilities: sequences times block size",
    "D": "sequences whose rows the device lays out; 0 where the host has laid out all",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """One tensor of an engine.

    A cache is an input and, under `alias`, an output in the same memory. A link is an input that the other engine of
    the pair gives as its output of that name: the same memory, which the host does not write.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    kind: Kind = "input"

    @property
    def alias(self) -> str:
        """Name of a cache as an output."""
        return f"{self.name}.out"


def resolved_shape(binding: Binding, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor where the dimensions have these sizes."""
    return tuple(
        side if isinstance(side, int) else sizes["R"] + 1 if side == "R+1" else sizes[side]
        for side in binding.shape
    )


def numpy_dtype(binding: Binding) -> np.dtype[Any]:
    """Return how the host sees a tensor; numpy has no bf16, and nothing on the host reads one."""
    names = {"fp32": "float32", "fp16": "float16", "bf16": "uint16", "i32": "int32", "i64": "int64"}
    return np.dtype(names[binding.dtype])


@dataclass(frozen=True, slots=True)
class SampleHead:
    """Which parts the sequential head of a drafter has: the attributes of `DSparkBlockSample`."""

    head: int  # 0 none, 1 vanilla, 2 gated, 3 RNN
    confidence: int  # 0 none, 1 over h, 2 over h and W1[x]
    mapped: bool  # a reduced draft vocabulary
    previous: bool  # rows of W1 are found through a map

    @classmethod
    def of(cls, config: DrafterConfig, *, previous: bool) -> SampleHead:
        kinds = {"vanilla": 1, "gated": 2, "rnn": 3}
        return cls(
            head=kinds[config.markov_head_type] if config.markov_rank else 0,
            confidence=(2 if config.confidence_head_with_markov else 1)
            if config.enable_confidence_head
            else 0,
            mapped=config.draft_vocab_size != config.vocab_size,
            previous=previous,
        )


def head_precision(precision: Precision) -> Precision:
    """Return the type of embedding and LM head: bf16 engines hold them in fp16.

    Logits of 8 bits would tie by the dozen; 11 bits cost the same traffic.
    """
    return "fp16" if precision == "bf16" else precision


@dataclass(frozen=True, slots=True)
class VerifyShape:
    """What the target engine knows of the drafts that it verifies: the attributes of `DSparkVerify`, and whether it
    can choose how many of them.

    Without a drafter every draft is one-hot, and there are no probabilities to read.
    """

    block_size: int = 0  # G; 0 = no drafter
    draft_vocab_size: int = 0  # Vd
    mapped: bool = False  # a reduced draft vocabulary
    rated: bool = False  # drafts have confidences: `DSparkSchedule` can cut them and lay their rows out

    @classmethod
    def of(cls, config: DrafterConfig | None) -> VerifyShape:
        if config is None:
            return cls()
        mapped = config.draft_vocab_size != config.vocab_size
        rated = config.enable_confidence_head and config.block_size <= VERIFY_DEPTH
        return cls(config.block_size, config.draft_vocab_size, mapped, rated)


def target_bindings(
    config: TargetConfig,
    *,
    precision: Precision,
    feature_layer_ids: tuple[int, ...],
    verify: VerifyShape | None,
) -> tuple[Binding, ...]:
    """Return the tensors of the target engine, weights that the drafter shares included.

    Arguments:
        verify: of what it verifies; None for passes that only give logits.
    """
    decoder, vocab_size = config.decoder, config.vocab_size
    slot = (2, decoder.num_kv_heads, decoder.head_dim)
    features = len(feature_layer_ids) * decoder.hidden_size
    return (
        Binding("tokens", "i32", ("T",)),
        Binding("positions", "i32", ("T",)),
        Binding("query_start", "i32", ("R+1",)),
        Binding("context_len", "i32", ("R",)),
        Binding("page_table", "i32", ("R", "P")),
        Binding("slots", "i32", ("T",)),
        Binding("ancestors", "i32", ("T", "W")),
        Binding("logit_rows", "i32", ("M",)),
        *(_verify_inputs(verify) if verify else ()),
        *(_schedule_inputs(verify.block_size) if verify and verify.rated else ()),
        *_caches(decoder.num_layers, precision, slot),
        *_table_bindings(config, precision),
        Binding("logits", "fp32", ("M", vocab_size), "output"),
        Binding("argmax", "i32", ("M",), "output"),
        Binding("finite", "i32", ("M",), "output"),
        *(_verify_outputs() if verify else ()),
        *((Binding("verify_len", "i32", ("D",), "output"),) if verify and verify.rated else ()),
        *((Binding("features", "fp32", ("T", features), "output"),) if features else ()),
    )


def _verify_inputs(verify: VerifyShape) -> tuple[Binding, ...]:
    probs = (
        Binding("prob_rows", "i32", ("M",)),
        Binding("draft_probs", "fp32", ("Q", verify.draft_vocab_size), "link"),
    )
    return (
        Binding("verify_start", "i32", ("R+1",)),
        *(probs if verify.block_size else ()),
        Binding("first_positions", "i32", ("R",)),
        *_draw_bindings(),
    )


def _schedule_inputs(block_size: int) -> tuple[Binding, ...]:
    kinds, numbers = CALIBRATION_SHAPE
    return (
        Binding("anchors", "i32", ("D",)),
        Binding("kinds", "i32", ("D",)),
        Binding("calibration", "fp32", (kinds, block_size, numbers)),
        Binding("budget", "i32", (1,)),
        Binding("draft_tokens", "i32", ("D", block_size), "link"),
        Binding("num_tokens", "i32", ("D",), "link"),
        Binding("confidence_logits", "fp32", ("D", block_size), "link"),
    )


def _verify_outputs() -> tuple[Binding, ...]:
    return (
        Binding("accepted", "i32", ("R",), "output"),
        Binding("path", "i32", ("R", VERIFY_DEPTH), "output"),
        Binding("next_token", "i32", ("R",), "output"),
    )


def _draw_bindings() -> tuple[Binding, ...]:
    return (
        Binding("seeds", "i64", ("R",)),
        Binding("temperature", "fp32", ("R",)),
        Binding("top_k", "i32", ("R",)),
        Binding("top_p", "fp32", ("R",)),
        Binding("min_p", "fp32", ("R",)),
        Binding("coupled", "i32", ("R",)),
    )


def shared_tables(
    config: DrafterConfig, *, precision: Precision, tied: bool, own_embedding: bool, own_head: bool
) -> tuple[Binding, ...]:
    """Return the weights that a drafter takes from its target; a reduced vocabulary has a head of its own.

    Arguments:
        tied: the target's LM head is its embedding.
        own_embedding, own_head: the drafter's checkpoint has them.
    """
    whole_head = not own_head and config.draft_vocab_size == config.vocab_size
    names = {"embed_tokens": not own_embedding or (whole_head and tied), "lm_head": whole_head and not tied}
    shape = (config.vocab_size, config.decoder.hidden_size)
    return tuple(
        Binding(name, head_precision(precision), shape, "weight") for name, taken in names.items() if taken
    )


def drafter_bindings(
    config: DrafterConfig, *, precision: Precision, shared: tuple[Binding, ...]
) -> tuple[Binding, ...]:
    """Return the tensors of the drafter engine; `shared` are the weights it takes from the target."""
    decoder, block_size = config.decoder, config.block_size
    slot = (2, decoder.num_kv_heads, decoder.head_dim)
    features = len(config.target_layer_ids) * decoder.hidden_size
    return (
        Binding("features", "fp32", ("N", features)),
        Binding("new_positions", "i32", ("N",)),
        Binding("new_slots", "i32", ("N",)),
        Binding("anchors", "i32", ("R",)),
        Binding("anchor_positions", "i32", ("R",)),
        Binding("context_len", "i32", ("R",)),
        Binding("page_table", "i32", ("R", "P")),
        Binding("num_drafts", "i32", ("R",)),
        *_draw_bindings(),
        *_caches(decoder.num_layers, precision, slot),
        *shared,
        Binding("draft_tokens", "i32", ("R", block_size), "output"),
        Binding("num_tokens", "i32", ("R",), "output"),
        Binding("draft_probs", "fp32", ("R", block_size, config.draft_vocab_size), "output"),
        Binding("confidence_logits", "fp32", ("R", block_size), "output"),
        Binding("base_logits", "fp32", ("R", block_size, config.draft_vocab_size), "output"),
        Binding("hidden", "fp32", ("R", block_size, decoder.hidden_size), "output"),
    )


def _table_bindings(config: TargetConfig, precision: Precision) -> tuple[Binding, ...]:
    shape = (config.vocab_size, config.decoder.hidden_size)
    names = ("embed_tokens",) if config.tie_word_embeddings else ("embed_tokens", "lm_head")
    return tuple(Binding(name, head_precision(precision), shape, "weight") for name in names)


def _caches(num_layers: int, precision: Precision, slot: tuple[int, ...]) -> tuple[Binding, ...]:
    return tuple(Binding(f"kv_cache.{i}", precision, ("S", *slot), "cache") for i in range(num_layers))
