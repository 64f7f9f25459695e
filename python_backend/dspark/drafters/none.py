"""The drafter that never drafts: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.executors.interface import Float32, Int32

__all__ = ["NoneDrafter"]


class NoneDrafter:
    """Proposes nothing, caches nothing."""

    name = "none"
    block_size = 0
    feature_layer_ids: tuple[int, ...] = ()

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate nothing."""

    def cache_page_bytes(self, page_size: int) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Return empty blocks."""
        return DraftBlock.empty(len(inputs), 0)

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Look at nothing."""

    def release(self, sequence_id: int) -> None:
        """Forget nothing."""
