"""The engine: one step for all sequences at once.

    batch -> draft -> schedule -> verify -> commit -> learn

`Engine.step` is that line; everything else here is one call away from it. One thread owns an engine (`thread.
EngineThread` is that thread in a server); nothing here locks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from dspark.drafters.interface import DraftBlock, Drafter, DraftInput
from dspark.engine.admission import EngineLimits, check_request
from dspark.engine.batching import Batcher, StepPlan
from dspark.engine.commit import append_tokens, non_finite_error, verified_rows
from dspark.engine.pages import PagePool
from dspark.engine.sequence import Sequence
from dspark.engine.step_batch import StepRows, build_step_rows
from dspark.errors import EngineError
from dspark.executors.interface import Int32, TargetExecutor, TargetOutput
from dspark.models.tokenizer import Tokenizer
from dspark.request import Request, RequestOutput, SamplingParams, SpecMetrics
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import Verdict, verify_chain
from dspark.scheduling.scheduler import Scheduler, StepObservation
from dspark.text.assembler import TextAssembler

__all__ = ["Engine", "EngineLimits", "EngineStats"]

log = logging.getLogger("dspark.engine")


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and what is held right now."""

    num_running: int = 0
    num_waiting: int = 0
    pages_held: int = 0
    pages_total: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0  # sequence-steps that verified at least one draft
    num_proposed_tokens: int = 0
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # found again by prefix reuse
    num_generation_tokens: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_drafter_faults: int = 0


class Engine:
    """Runs requests to their end, many at a time.

    Arguments:
        target: executor whose cache is not yet allocated; the engine allocates it.
        drafter: likewise.
        scheduler: decides how many drafts are made and verified.
        tokenizer: None serves token ids only.
        rule: how sampled drafts are judged; see `TokenSampler`.
    """

    def __init__(
        self,
        *,
        target: TargetExecutor,
        drafter: Drafter,
        scheduler: Scheduler,
        limits: EngineLimits,
        tokenizer: Tokenizer | None = None,
        rule: Literal["auto", "rejection", "coupled"] = "auto",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = scheduler
        self.limits = limits
        self.tokenizer = tokenizer
        self._verification_rule = rule
        self._pool = PagePool(num_pages=limits.num_pages, page_size=limits.page_size)
        self._batcher = Batcher(
            self._pool, max_batch_size=limits.max_batch_size, max_step_tokens=limits.max_step_tokens
        )
        target.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
        drafter.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
        # A policy that never drafts spares the drafter's context as well.
        self._drafting = drafter.block_size > 0 and scheduler.policy != "none"
        self._feeds_drafter = self._drafting and bool(drafter.feature_layer_ids)
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._stats = EngineStats(pages_total=limits.num_pages)

    # -- doors ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check(self, request: Request) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: naming the field, the value and what is allowed.
        """
        check_request(
            request,
            vocab_size=self.target.config.vocab_size,
            limits=self.limits,
            has_tokenizer=self.tokenizer is not None,
        )

    def add(self, request: Request) -> int:
        """Queue a request; return its id.

        Raises:
            RequestError: as `check`.
        """
        self.check(request)
        params, config = request.params, self.target.config
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        eos_ids = tuple(sorted({*config.eos_ids, *(self.tokenizer.eos_ids if self.tokenizer else ())}))
        self._next_id += 1
        drafts = self._drafting and params.num_draft_tokens != 0
        root = self._pool.root("drafter" if self._feeds_drafter and drafts else "target")
        sequence = Sequence(
            sequence_id=self._next_id,
            request=request,
            seed=seed,
            sampler=TokenSampler(
                params,
                seed=seed,
                prompt_ids=request.prompt_ids,
                vocab_size=config.vocab_size,
                eos_ids=eos_ids,
                rule=self._verification_rule,
            ),
            assembler=self._assembler(params),
            token_ids=list(request.prompt_ids),
            prompt_len=len(request.prompt_ids),
            arrival=self._next_id,
            page_row=np.full(self._pool.pages_for(self.limits.max_context_len), -1, np.int32),
            root=root,
            node=root,
            metrics=SpecMetrics(arrival_time_ns=time.time_ns(), seed=seed),
        )
        self._sequences[sequence.sequence_id] = sequence
        self._batcher.add(sequence)
        return sequence.sequence_id

    def _assembler(self, params: SamplingParams) -> TextAssembler | None:
        if self.tokenizer is None:
            return None
        return TextAssembler.for_tokenizer(self.tokenizer, params.stop_words, min_tokens=params.min_tokens)

    def cancel(self, request_id: int) -> None:
        """End a request between two steps; unknown or finished ids are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.finished:
            sequence.finish_reason = "cancelled"
            self._stats.num_cancelled += 1
            self._finish(sequence)

    def fail_all(self, error: Exception) -> None:
        """End everything with an error."""
        for sequence in tuple(self._sequences.values()):
            sequence.error = error
            self._finish(sequence)

    def stats(self) -> EngineStats:
        """Return the live counters (do not change them)."""
        self._stats.num_running = len(self._batcher.running)
        self._stats.num_waiting = len(self._batcher.waiting)
        self._stats.pages_held = self._pool.num_held
        self._stats.num_preemptions = self._batcher.num_preemptions
        return self._stats

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step of everything; return False when there was nothing to do."""
        self._end_cancelled_and_late()
        plan = self._batcher.plan()
        if not plan.decoding and not plan.prefill:
            return False
        started = time.perf_counter()
        block = self._draft(plan)
        drafted = time.perf_counter()
        verify_len = self._schedule(plan, block)
        rows = build_step_rows(plan, block, verify_len, page_size=self.limits.page_size)
        scheduled = time.perf_counter()
        output = self.target.forward(rows.batch)
        verified = time.perf_counter()
        verdicts = self._commit(plan, block, rows, output)
        self._learn(
            plan,
            block,
            rows,
            verdicts,
            started_s=started,
            draft_s=drafted - started,
            verify_s=verified - scheduled,
        )
        return True

    # -- draft ----------------------------------------------------------------------------------------------------

    def _draft(self, plan: StepPlan) -> DraftBlock:
        sequences = plan.decoding
        if not self._drafting or not sequences:
            return DraftBlock.empty(len(sequences), self.drafter.block_size)
        caps = np.array([self._draft_cap(s) for s in sequences], np.int32)
        wanted = self.scheduler.draft_len(
            sequence_ids=np.array([s.sequence_id for s in sequences]),
            caps=caps,
            prefill_tokens=plan.num_prefill_tokens,
        )
        if not wanted.any():
            return DraftBlock.empty(len(sequences), self.drafter.block_size)
        inputs = [
            DraftInput(
                sequence_id=s.sequence_id,
                token_ids=s.token_ids,
                max_drafts=int(min(want, cap)),
                sampler=s.sampler,
                pages=s.pages,
            )
            for s, want, cap in zip(sequences, wanted, caps, strict=True)
        ]
        try:
            return self.drafter.propose(inputs)
        except Exception:  # drafts are optional: the target alone still gives the right answer
            self._stats.num_drafter_faults += 1
            if self._stats.num_drafter_faults == 1:
                log.exception("the drafter failed; this step goes on without drafts")
            return DraftBlock.empty(len(sequences), self.drafter.block_size)

    def _draft_cap(self, sequence: Sequence) -> int:
        """Return the most drafts that could be of use: request's cap, block size, room in the context."""
        cap = min(self.drafter.block_size, self.limits.max_context_len - len(sequence.token_ids))
        if sequence.request.params.num_draft_tokens >= 0:
            cap = min(cap, sequence.request.params.num_draft_tokens)
        if not self.scheduler.policy.startswith("fixed:"):  # fixed:K means K, also at the end of an answer
            cap = min(cap, sequence.request.params.max_tokens - sequence.output_len - 1)
        return max(cap, 0)

    # -- schedule -------------------------------------------------------------------------------------------------

    def _schedule(self, plan: StepPlan, block: DraftBlock) -> Int32:
        """Return how many drafts of each decoding sequence are verified [R]; pages for them are held."""
        if not block.num_tokens.any():
            return np.zeros(len(plan.decoding), np.int32)
        verify_len = self.scheduler.verify_len(
            sequence_ids=np.array([s.sequence_id for s in plan.decoding]),
            confidence_logits=block.confidence_logits,
            num_drafts=block.num_tokens,
            sampled=np.array([not s.request.params.greedy for s in plan.decoding]),
            altered=np.array([s.request.params.alters_logits for s in plan.decoding]),
            prefill_tokens=plan.num_prefill_tokens,
        )
        return np.array(
            [
                self._batcher.room_for_drafts(s, int(length))
                for s, length in zip(plan.decoding, verify_len, strict=True)
            ],
            np.int32,
        )

    # -- commit ---------------------------------------------------------------------------------------------------

    def _commit(
        self, plan: StepPlan, block: DraftBlock, rows: StepRows, output: TargetOutput
    ) -> list[Verdict | None]:
        """Judge every sequence's rows and append what was accepted; one that fails, fails alone."""
        now_ns = time.time_ns()
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if sequence.metrics.first_scheduled_time_ns == 0:
                sequence.metrics.first_scheduled_time_ns = now_ns
                self._stats.num_cached_prompt_tokens += chunk.start
            sequence.cached_len += chunk.count
            self._stats.num_prompt_tokens += chunk.count
        verdicts: list[Verdict | None] = []
        confidence = block.confidence()
        for index, sequence in enumerate(plan.decoding):
            num_drafts = rows.num_drafts(index)
            judge = partial(self._judge, sequence, num_drafts, block, index, rows.logit_span(index))
            verdict = self._guarded(sequence, partial(judge, output), now_ns)
            if verdict is not None:
                sequence.record_step(
                    block, confidence, index, verify_len=num_drafts, accepted=verdict.accepted
                )
            verdicts.append(verdict)
        for chunk, row in zip((c for c in plan.prefill if c.last), rows.first_token_rows, strict=True):
            judge = partial(self._judge, chunk.sequence, 0, None, 0, slice(row, row + 1))
            self._guarded(chunk.sequence, partial(judge, output), now_ns)
        self._feed_drafter(plan, rows, output)
        for sequence in (*plan.decoding, *(chunk.sequence for chunk in plan.prefill)):
            if sequence.error is None:
                self._batcher.register_full_pages(sequence)
            if sequence.finished:
                self._finish(sequence)
        return verdicts

    def _judge(
        self,
        sequence: Sequence,
        num_drafts: int,
        block: DraftBlock | None,
        index: int,
        span: slice,
        output: TargetOutput,
    ) -> Verdict:
        """Return the verdict over one sequence's drafts; rows that are not finite end the usable part."""
        usable = verified_rows(output.finite[span])
        if usable == 0:
            raise non_finite_error(len(sequence.token_ids))
        num_drafts = min(num_drafts, usable - 1)
        drafts = block.tokens[index, :num_drafts].tolist() if block is not None else []
        distributions = block.distributions[index] if block is not None and block.distributions else None
        return verify_chain(
            sequence.sampler,
            output.logits[span],
            output.argmax[span],
            drafts,
            distributions,
            position=len(sequence.token_ids),
        )

    def _guarded(self, sequence: Sequence, judge: Callable[[], Verdict], now_ns: int) -> Verdict | None:
        """Judge and append; an error in one sequence's own path ends that sequence only."""
        try:
            verdict = judge()
            decoded = sequence.output_len > 0
            committed, delta = append_tokens(sequence, verdict, max_context_len=self.limits.max_context_len)
            if decoded:
                sequence.cached_len += 1 + min(verdict.accepted, committed)
        except Exception as error:
            sequence.error = error
            self._stats.num_failed += 1
            return None
        metrics = sequence.metrics
        metrics.last_token_time_ns = now_ns
        if metrics.first_token_time_ns == 0:
            metrics.first_token_time_ns = now_ns
        self._stats.num_generation_tokens += committed
        if not sequence.finished:
            self._emit(sequence, sequence.token_ids[len(sequence.token_ids) - committed :], delta)
        else:
            sequence.last_delta = (tuple(sequence.token_ids[len(sequence.token_ids) - committed :]), delta)
        return verdict

    def _feed_drafter(self, plan: StepPlan, rows: StepRows, output: TargetOutput) -> None:
        """Hand the features of committed rows to a drafter that wants them."""
        if not self._feeds_drafter:
            return
        kept = rows.committed_rows(plan, wanted=lambda s: s.root == self._pool.root("drafter"))
        if not len(kept):
            return
        assert output.features is not None
        self.drafter.observe(
            features=output.features[kept], positions=rows.batch.positions[kept], slots=rows.batch.slots[kept]
        )

    # -- learn ----------------------------------------------------------------------------------------------------

    def _learn(
        self,
        plan: StepPlan,
        block: DraftBlock,
        rows: StepRows,
        verdicts: list[Verdict | None],
        *,
        started_s: float,
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Count, and tell the scheduler what happened."""
        accepted = np.array([0 if v is None else v.accepted for v in verdicts], np.int32)
        self._stats.num_steps += 1
        self._stats.num_spec_steps += int(np.count_nonzero(rows.verify_len))
        self._stats.num_proposed_tokens += int(block.num_tokens.sum())
        self._stats.num_draft_tokens += int(rows.verify_len.sum())
        self._stats.num_accepted_tokens += int(accepted.sum())
        if plan.decoding:
            self.scheduler.observe(
                StepObservation(
                    sequence_ids=np.array([s.sequence_id for s in plan.decoding]),
                    num_drafts=block.num_tokens,
                    verify_len=rows.verify_len,
                    accepted=accepted,
                    confidence_logits=block.confidence_logits,
                    soft_labels=None,
                    sampled=np.array([not s.request.params.greedy for s in plan.decoding]),
                    altered=np.array(
                        [
                            s.request.params.alters_logits or v is None
                            for s, v in zip(plan.decoding, verdicts, strict=True)
                        ]
                    ),
                    num_blocks=int(np.count_nonzero(block.num_tokens)),
                    target_tokens=len(rows.batch.tokens),
                    context_tokens=int(rows.batch.context_len.sum()),
                    prefill_tokens=plan.num_prefill_tokens,
                    draft_s=draft_s,
                    verify_s=verify_s,
                    step_s=time.perf_counter() - started_s,
                )
            )

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end_cancelled_and_late(self) -> None:
        now = time.monotonic()
        for sequence in tuple(self._sequences.values()):
            request = sequence.request
            if request.is_cancelled is not None and self._client_left(request.is_cancelled):
                self.cancel(sequence.sequence_id)
            elif request.deadline_s is not None and now >= request.deadline_s:
                sequence.finish_reason = "timeout"
                self._finish(sequence)

    @staticmethod
    def _client_left(is_cancelled: Callable[[], bool]) -> bool:
        try:
            return is_cancelled()
        except Exception:
            log.exception("a request could not tell whether its client is still there; it is cancelled")
            return True

    def _emit(self, sequence: Sequence, token_ids: list[int], delta: str | None) -> None:
        self._deliver(
            sequence, RequestOutput(request_id=sequence.sequence_id, token_ids=tuple(token_ids), text=delta)
        )

    def _finish(self, sequence: Sequence) -> None:
        """Give everything back and send the last output."""
        del self._sequences[sequence.sequence_id]
        self._batcher.remove(sequence)
        self.drafter.release(sequence.sequence_id)
        self.scheduler.release(sequence.sequence_id)
        token_ids, delta = sequence.last_delta
        if sequence.assembler is not None and sequence.error is None:
            delta = (delta or "") + sequence.assembler.finish()
        self._deliver(
            sequence,
            RequestOutput(
                request_id=sequence.sequence_id,
                token_ids=token_ids,
                text=delta,
                finish_reason=None if sequence.error is not None else sequence.finish_reason,
                error=sequence.error,
                metrics=sequence.metrics,
                steps=tuple(sequence.records),
            ),
        )

    def _deliver(self, sequence: Sequence, output: RequestOutput) -> None:
        try:
            sequence.request.emit(output)
        except Exception:
            log.exception("request %d: its receiver failed; the request is dropped", sequence.sequence_id)
            if not output.final and not sequence.finished:
                sequence.error = EngineError("the receiver of this request failed")
