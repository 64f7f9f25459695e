"""Which kernels a target and its drafter need: every form that plugins and launchers can choose for them.

Plain numbers, no torch, no Triton language.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant

__all__ = ["BLOCK_SIZES", "HEADS", "SHAPES", "ModelShape", "variants_for"]

BLOCK_SIZES = (7, 15)  # drafts of a block that drafters are published with
HEADS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a target decides its kernels; its drafter has the same heads."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    qk_norm: bool = False  # queries and keys are normed: attention takes them in fp32


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen3-4B", 32, 8, 128, 2560, 151936, qk_norm=True),
        ModelShape("Qwen3-8B", 32, 8, 128, 4096, 151936, qk_norm=True),
        ModelShape("Llama-3.1-8B", 32, 8, 128, 4096, 128256),
        ModelShape("SmolLM2-135M", 9, 3, 64, 576, 49152),
    )
}


def variants_for(
    shape: ModelShape,
    *,
    dtype: str,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    head: str = "vanilla",
    rank: int = 256,
    window: bool = False,
    trees: bool = True,
) -> list[Variant]:
    """Return the forms for one target and drafter, each once.

    Arguments:
        dtype: fp16, bf16 or fp32, of weights, caches and activations; logits, and normed queries and keys, are fp32.
        block_sizes: drafts of a block, of every drafter that is to be served.
        head: the drafter's sequential head, a key of `HEADS`.
        rank: of that head; 0 only without one.
        window: sliding windows too.
        trees: verification of trees too, beside chains.
    """
    found = [
        *_attention(shape, dtype=dtype, block_sizes=block_sizes, window=window, trees=trees),
        plans.merge_splits(num_heads=shape.num_heads, head_dim=shape.head_dim, dtype=dtype),
        plans.write_rows(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            input_dtype=_input_dtype(shape, dtype),
            rope=True,
        ),
        plans.block_sample(
            vocab_size=shape.vocab_size,
            rank=0 if head == "none" else rank,
            head=HEADS[head],
            confidence=1 if head == "none" else 2,
            mapped=False,
            previous=False,
            dtype="fp32",
            weight_dtype=dtype,
            cooperative=True,
        ),
        plans.row_limits(dtype="fp32"),
        plans.chain_weights(dtype="fp32", mapped=False),
        *(
            plans.walk(dtype="fp32", tree=tree, probs=True, mapped=False)
            for tree in ((False, True) if trees else (False,))
        ),
        plans.schedule(),
    ]
    return list({variant.key: variant for variant in found}.values())


def _input_dtype(shape: ModelShape, dtype: str) -> str:
    return "fp32" if shape.qk_norm else dtype


def _attention(
    shape: ModelShape, *, dtype: str, block_sizes: Sequence[int], window: bool, trees: bool
) -> Iterator[Variant]:
    """Yield the forms of the target's passes (by rows of a typical sequence) and of the drafter's blocks."""
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    types = {"dtype": dtype, "input_dtype": _input_dtype(shape, dtype)}
    for windowed in (False, True) if window else (False,):
        for mask in (plans.CHAIN, plans.TREE) if trees else (plans.CHAIN,):
            for rows in sorted({1, *(1 + size for size in block_sizes), plans.SPLIT_ROWS, 1024}):
                for split in (False, True) if rows <= plans.SPLIT_ROWS else (False,):
                    yield plans.attention(
                        **heads, **types, rows=rows, fixed_rows=0, mask=mask, rope=True,
                        window=windowed, write=True, split=split,
                    )  # fmt: skip
        for block_size, split in product(block_sizes, (False, True)):
            yield plans.attention(
                **heads, **types, rows=block_size, fixed_rows=block_size, mask=plans.FULL, rope=True,
                window=windowed, write=False, split=split,
            )  # fmt: skip
