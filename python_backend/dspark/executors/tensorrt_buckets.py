"""Which shapes a call may have: few, so that each can be prepared once. Rows are added up to the next one.

Pure numbers; what the added rows hold is `tensorrt_target`'s and `tensorrt_drafter`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.errors import EngineError

__all__ = ["EngineShapes", "Sizes", "bucket", "drafter_buckets", "target_buckets"]

Sizes = dict[str, int]  # by the letters of `tensorrt_bindings.DIMENSIONS`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShapes:
    """The largest call of each kind; buffers are as large as these ask for."""

    max_sequences: int  # R
    max_tokens: int  # T, rows of a target pass
    max_logit_rows: int  # M
    max_pages: int  # P, of a sequence: every page table has this width
    max_new_rows: int  # N, context rows that one drafter call takes
    max_words: int = 1  # W, mask words of a tree's row
    graph_tokens: int = 256  # passes up to this many rows are prepared at start-up

    def largest(self) -> Sizes:
        """Return the largest size of every dimension but S."""
        return {
            "R": self.max_sequences,
            "T": self.max_tokens,
            "M": self.max_logit_rows,
            "P": self.max_pages,
            "N": self.max_new_rows,
            "W": self.max_words,
        }


def bucket(name: str, wanted: int, largest: int) -> int:
    """Return the smallest power of two that holds `wanted`, cut at `largest`; at least 1.

    Raises:
        EngineError: more than the engine was made for.
    """
    if wanted > largest:
        raise EngineError(f"{name}: got {wanted}, the engine was made for at most {largest}")
    return min(1 << max(wanted - 1, 0).bit_length(), largest)


def _powers(largest: int) -> list[int]:
    found = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent < largest]
    return [*found, largest]


def target_buckets(shapes: EngineShapes) -> list[Sizes]:
    """Return the decoding and verifying passes to prepare: chains whose every row's logits are wanted."""
    return [
        {"R": rows, "T": tokens, "M": tokens, "P": shapes.max_pages, "W": 0}
        for rows in _powers(shapes.max_sequences)
        for tokens in _powers(shapes.max_tokens)
        if rows <= tokens <= min(shapes.graph_tokens, shapes.max_logit_rows)
    ]


def drafter_buckets(shapes: EngineShapes, block_size: int) -> list[Sizes]:
    """Return the drafting calls to prepare: each sequence brings what one step can commit, at most a block and one."""
    return [
        {"R": rows, "N": new_rows, "P": shapes.max_pages}
        for rows in _powers(shapes.max_sequences)
        for new_rows in _powers(shapes.max_new_rows)
        if new_rows <= min(bucket("new rows", rows * (1 + block_size), 1 << 30), shapes.graph_tokens)
    ]
