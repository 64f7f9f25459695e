"""Drafts token by token: a smaller language model, or a head that goes on from the target's hidden states.

What runs is a runner with the target executor's one call. Its cache lies under the target's page ids, beside the
target's, and is its own affair: rows of committed tokens that are missing from it (a prompt, pages that were found
again, a resumed sequence, the last accepted draft) are computed by the first pass of the next `propose`, together with
the anchors; each further draft is one row of one more pass. Long prompts are caught up with some rows a step, and
their sequences draft when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark.drafters.drawing import DrawnDrafts
from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.drafters.written_text import WrittenText
from dspark.executors.interface import Float32, Int32, StepBatch, TargetOutput

__all__ = ["AutoregressiveDrafter", "DraftRunner", "FeatureRunner"]


class DraftRunner(Protocol):
    """What drafts with: every `TargetExecutor` is one."""

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None: ...

    def cache_page_bytes(self, page_size: int) -> int: ...

    def forward(self, batch: StepBatch) -> TargetOutput:
        """Write the rows' K/V and return the logits of `logit_rows`."""


class FeatureRunner(DraftRunner, Protocol):
    """A runner that also reads the target's hidden states."""

    def append_features(self, *, features: Float32, slots: Int32) -> None:
        """Take the features [N, m*d] of committed rows; those of slot s are read by the row behind it."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows start .. stop-1 of a sequence in the first pass; `drafts` when the last of them is the anchor."""

    row: int  # among the sequences that want drafts
    item: DraftInput
    held: int  # tokens whose rows are there already
    start: int
    stop: int
    drafts: bool


class AutoregressiveDrafter:
    """A `Drafter` whose drafts are each a pass of its runner.

    Arguments:
        runner: its cache is not allocated yet.
        name: of the drafter.
        block_size: G, the most drafts of one step.
        max_context_len: positions that the runner knows; sequences draft only below.
        draft_to_target: [Vd] int32 ascending target ids of a reduced draft vocabulary, None for the full one.
        features: of a `FeatureRunner`: the runner itself, and the target layers it reads. Its rows begin at position
            1, and those of drafts are computed anew once the target has said what it thinks of them.
        max_step_tokens: rows of one step that catch up with long prompts.
    """

    has_confidence = False
    writes_drafts = True

    def __init__(
        self,
        runner: DraftRunner,
        *,
        name: str,
        block_size: int,
        max_context_len: int,
        draft_to_target: Int32 | None = None,
        features: tuple[FeatureRunner, tuple[int, ...]] | None = None,
        max_step_tokens: int = 256,
    ) -> None:
        self.runner, self.name, self.block_size = runner, name, block_size
        self.max_context_len, self.max_step_tokens = max_context_len, max_step_tokens
        self._features = None if features is None else features[0]
        self.feature_layer_ids = () if features is None else features[1]
        self._draft_to_target = draft_to_target
        self._text = WrittenText(num_pages=0, page_size=1)

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the runner's cache beside the target's."""
        self.runner.allocate_cache(num_pages=num_pages, page_size=page_size)
        self._text = WrittenText(num_pages=num_pages, page_size=page_size)

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page, what is remembered of its text included."""
        return self.runner.cache_page_bytes(page_size) + 4 * page_size + 16

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:  # noqa: ARG002
        """Hand the features of committed rows to a runner that reads them."""
        if self._features is not None:
            self._features.append_features(features=features, slots=slots)

    def release(self, sequence_id: int) -> None:
        """Forget the sequence; what it left in pages may be found again."""
        self._text.release(sequence_id)

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Catch up, then draft up to `max_drafts` tokens for each sequence that is caught up."""
        drafts = DrawnDrafts(len(inputs), self.block_size, draft_to_target=self._draft_to_target)
        limits = [self._num_drafts(item) for item in inputs]
        spans = self._spans([(row, item) for row, item in enumerate(inputs) if limits[row] > 0])
        if spans:
            self._draft(spans, drafts, limits)
        return drafts.block()

    def _num_drafts(self, item: DraftInput) -> int:
        """Return how many drafts are wanted and have room: each but the last is a row behind the anchor's."""
        room = min(len(item.pages) * self._text.page_size, self.max_context_len)
        return min(item.max_drafts, self.block_size, room - len(item.token_ids) + 1)

    def _spans(self, wanted: Sequence[tuple[int, DraftInput]]) -> list[_Span]:
        """Return what the first pass computes.

        A page that several sequences share is written by the first of them; the others wait a step.
        """
        spans: list[_Span] = []
        budget, writing = self.max_step_tokens, set[int]()
        for row, item in wanted:
            length = len(item.token_ids)
            # The anchor's logits are needed, so its row is computed in any case.
            held = min(self._text.held(item.sequence_id, item.token_ids, item.pages), length - 1)
            start = max(held, 1 if self._features is not None else 0)
            missing = length - start
            count = missing if missing <= self.block_size + 1 else min(missing, budget)
            if count <= 0 or int(item.pages[start // self._text.page_size]) in writing:
                continue
            if missing > self.block_size + 1:
                budget -= count
            spans.append(_Span(row, item, held, start, start + count, count == missing))
            writing.update(self._pages(item, start, start + count))
        return spans

    def _pages(self, item: DraftInput, start: int, stop: int) -> list[int]:
        size = self._text.page_size
        pages: list[int] = item.pages[start // size : (stop - 1) // size + 1].tolist()
        return pages

    def _draft(self, spans: list[_Span], drafts: DrawnDrafts, limits: list[int]) -> None:
        rows = [
            (span.item, span.start, list(span.item.token_ids[span.start : span.stop]), span.drafts)
            for span in spans
        ]
        output = self._forward(rows)
        for span in spans:
            self._text.record(
                span.item.sequence_id, span.item.token_ids[: span.stop], span.item.pages, start=span.held
            )
        alive = [(span.row, span.item) for span in spans if span.drafts]
        drafted_rows: dict[int, int] = {}  # drafts of a sequence whose rows were computed
        while alive:
            alive = self._draw(alive, output, drafts)
            alive = [(row, item) for row, item in alive if len(drafts[row]) < limits[row]]
            if not alive:
                break
            output = self._forward(
                [
                    (item, len(item.token_ids) - 1 + len(drafts[row]), drafts[row][-1:], True)
                    for row, item in alive
                ]
            )
            drafted_rows.update((row, len(drafts[row])) for row, _ in alive)
        if self._features is None:  # rows of accepted drafts are as good as any
            for span in spans:
                if count := drafted_rows.get(span.row):
                    text = [*span.item.token_ids, *drafts[span.row][:count]]
                    self._text.record(
                        span.item.sequence_id, text, span.item.pages, start=len(span.item.token_ids)
                    )

    def _draw(
        self, alive: list[tuple[int, DraftInput]], output: TargetOutput, drafts: DrawnDrafts
    ) -> list[tuple[int, DraftInput]]:
        """Draw the next draft of each sequence from its row of logits; return those that found one."""
        best = output.argmax if self._draft_to_target is None else self._draft_to_target[output.argmax]
        best = np.where(output.finite, best, -1)
        return [
            (row, item)
            for at, (row, item) in enumerate(alive)
            if drafts.draw(row, item, output.logits[at], best=int(best[at]))
        ]

    def _forward(self, rows: Sequence[tuple[DraftInput, int, list[int], bool]]) -> TargetOutput:
        """Run one pass.

        Arguments:
            rows: for each sequence where its rows start, their tokens, and whether the last one's logits are needed.
        """
        size = self._text.page_size
        counts = [len(tokens) for _, _, tokens, _ in rows]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        context_len = np.array([start for _, start, _, _ in rows], np.int32)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = (np.arange(query_start[-1]) - query_start[owner] + context_len[owner]).astype(np.int32)
        page_table = np.full((len(rows), max(len(item.pages) for item, *_ in rows)), -1, np.int32)
        for at, (item, *_) in enumerate(rows):
            page_table[at, : len(item.pages)] = item.pages
        slots = (page_table[owner, positions // size] * size + positions % size).astype(np.int32)
        self._text.forget(slots)
        wanted = [at for at, row in enumerate(rows) if row[3]]
        return self.runner.forward(
            StepBatch(
                tokens=np.array([token for _, _, tokens, _ in rows for token in tokens], np.int32),
                positions=positions,
                query_start=query_start,
                context_len=context_len,
                page_table=page_table,
                slots=slots,
                logit_rows=(query_start[1:] - 1)[wanted].astype(np.int32),
            )
        )
