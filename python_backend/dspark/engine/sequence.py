"""One request while the engine works on it: its tokens, its pages, how far its cache reaches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.interface import DraftBlock
from dspark.executors.interface import Float32, Int32
from dspark.request import FinishReason, Request, SpecMetrics, StepRecord, TokenLogProb
from dspark.sampling.transforms import TokenSampler
from dspark.text.assembler import TextAssembler

__all__ = ["Sequence"]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens 0 .. cached_len-1 are in the cache. While decoding, the one token behind them is the anchor."""

    sequence_id: int
    request: Request
    seed: int
    sampler: TokenSampler
    assembler: TextAssembler | None
    token_ids: list[int]  # prompt + output
    prompt_len: int
    arrival: int  # order of arrival; never changes, also not by preemption
    page_row: Int32  # [max pages of one sequence], -1 where no page is held
    root: int  # where its page chain starts
    metrics: SpecMetrics
    num_pages: int = 0
    cached_len: int = 0
    node: int = 0  # chain position after the last registered page
    num_registered: int = 0  # full pages registered or found again
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    last_delta: tuple[tuple[int, ...], str | None] = ((), None)  # what the last output still has to carry
    last_log_probs: tuple[TokenLogProb, ...] = ()  # of these tokens
    records: list[StepRecord] = field(default_factory=list)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_end(self) -> int:
        """Tokens that must be cached before the next token can come.

        A new sequence computes its whole prompt and draws its first token from the last row. A resumed one has its
        anchor already and computes everything before it, so that its next step drafts and verifies as if it had
        never been away.
        """
        return self.prompt_len if self.output_len == 0 else len(self.token_ids) - 1

    @property
    def decoding(self) -> bool:
        return self.output_len > 0 and self.cached_len == len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def pages(self) -> Int32:
        return self.page_row[: self.num_pages]

    def record_step(
        self, block: DraftBlock, confidence: Float32 | None, index: int, *, verify_len: int, accepted: int
    ) -> None:
        """Count one decoding step, and keep its record where the request asked for records."""
        metrics = self.metrics
        metrics.num_spec_steps += 1
        metrics.num_draft_tokens += verify_len
        metrics.num_accepted_draft_tokens += accepted
        metrics.acceptance_histogram.extend([0] * (accepted + 1 - len(metrics.acceptance_histogram)))
        metrics.acceptance_histogram[accepted] += 1
        if self.request.record_steps:
            count = int(block.num_tokens[index])
            self.records.append(
                StepRecord(
                    draft=tuple(block.tokens[index, :count].tolist()),
                    confidence=_rated(confidence, index, count),
                    verify_len=verify_len,
                    accepted=accepted,
                )
            )

    def hold_pages(self, pages: list[int]) -> None:
        self.page_row[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)

    def drop_pages(self) -> list[int]:
        """Forget all pages and everything cached; return the pages for the pool."""
        pages = [int(page) for page in self.pages]
        self.page_row[: self.num_pages] = -1
        self.num_pages = self.cached_len = self.num_registered = 0
        self.node = self.root
        return pages


def _rated(confidence: Float32 | None, index: int, count: int) -> tuple[float, ...] | None:
    """Return the confidences of one block; None where nothing rated it: no confidence head, or looked up."""
    if confidence is None or (count and np.isnan(confidence[index, 0])):
        return None
    return tuple(confidence[index, :count].tolist())
