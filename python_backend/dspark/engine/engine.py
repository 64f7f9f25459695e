"""The engine: one step for all sequences at once.

    batch -> draft -> schedule -> verify -> commit -> learn

`Engine.step` is that line; each word is one file beside this one:

    batching     who takes part            drafting     blocks, and how much of them is verified
    step_batch   the rows of the pass      judging      which drafts are accepted (verifying: on the device)
    scheduled_step   draft, schedule and verify without a look at the host, where the device can
    commit       what becomes the answer   learning     what the policy is told

One thread owns an engine (`thread.EngineThread` is that thread in a server); nothing here locks.
"""

from __future__ import annotations

import time

from dspark.drafters.interface import Drafter
from dspark.engine.admission import EngineLimits, check_request, make_sequence
from dspark.engine.batching import Batcher
from dspark.engine.commit import Committer
from dspark.engine.delivery import client_left, deliver_last
from dspark.engine.drafting import DraftStage
from dspark.engine.learning import StepClock, count_step, observe_step
from dspark.engine.pages import PagePool
from dspark.engine.prefill_budget import PrefillBudget
from dspark.engine.scheduled_step import ScheduledSteps
from dspark.engine.sequence import Sequence
from dspark.engine.stats import EngineStats
from dspark.engine.step_batch import StepRows, build_step_rows
from dspark.engine.step_report import StepWatcher
from dspark.engine.verifying import run_target
from dspark.executors.interface import CacheMover, TargetExecutor
from dspark.executors.verifying import ChainVerifier
from dspark.models.tokenizer import Tokenizer
from dspark.request import Request
from dspark.sampling.transforms import SampledRule
from dspark.sampling.verification import Verdict
from dspark.scheduling.scheduler import Scheduler

__all__ = ["Engine", "EngineLimits", "EngineStats"]


class Engine:
    """Runs requests to their end, many at a time.

    Arguments:
        target: executor; its cache of `limits.num_pages` pages is allocated and the engine's alone.
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
        rule: SampledRule = "auto",
    ) -> None:
        self.target = target
        self._verifier = target if isinstance(target, ChainVerifier) else None
        self.drafter = drafter
        self.scheduler = scheduler
        self.limits = limits
        self.tokenizer = tokenizer
        self._rule: SampledRule = rule
        self._pool = PagePool(num_pages=limits.num_pages, page_size=limits.page_size)
        self._batcher = Batcher(
            self._pool, max_batch_size=limits.max_batch_size, max_step_tokens=limits.max_step_tokens
        )
        self._stats = EngineStats(pages_total=limits.num_pages)
        self._drafts = DraftStage(
            drafter,
            scheduler,
            batcher=self._batcher,
            max_context_len=limits.max_context_len,
            stats=self._stats,
        )
        self._scheduled_steps = ScheduledSteps(
            target,
            drafter,
            scheduler,
            drafts=self._drafts,
            batcher=self._batcher,
            page_size=limits.page_size,
        )
        self._committer = Committer(max_context_len=limits.max_context_len, stats=self._stats)
        self._prefill_budget = PrefillBudget(max_tokens=limits.max_step_tokens)
        self.watcher: StepWatcher | None = None  # told of every step
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step of everything; return False when there was nothing to do."""
        self._end_cancelled_and_late()
        plan = self._batcher.plan(max_prefill=self._prefill_budget.tokens(num_decoding=1))
        if plan.empty:
            return False
        clock = StepClock()

        scheduled = self._scheduled_steps.run(plan, clock)
        if scheduled is not None:  # draft, schedule and verify with a single wait
            block, rows, output = scheduled
        else:
            block = self._drafts.draft(plan)
            clock.drafted()
            verify_len = self._drafts.schedule(plan, block)
            rows = build_step_rows(plan, block, verify_len, page_size=self.limits.page_size)
            clock.scheduled()
            output = run_target(self.target, self._verifier, plan, block, rows)
            clock.verified()
        verdicts = self._committer.commit(plan, block, rows, output, started_ns=clock.started_ns)
        self._settle(rows, verdicts)
        self._drafts.feed(plan, rows, output, verdicts)
        clock.committed()
        count_step(self._stats, block, rows, verdicts)
        observation = observe_step(plan, block, rows, output, verdicts, clock) if plan.decoding else None
        if observation is not None:
            self.scheduler.observe(observation)
            self._drafts.learn(plan, block, verdicts, observation)
        self._prefill_budget.observe(
            num_decoding=len(plan.decoding), prefill_tokens=plan.num_prefill_tokens, step_s=clock.step_s
        )
        if self.watcher is not None:
            self.watcher(clock.report(observation))

        self._close(plan.sequences)
        return True

    def _settle(self, rows: StepRows, verdicts: list[Verdict | None]) -> None:
        """Put the K/V of accepted nodes of trees one behind the other."""
        from_slots, to_slots = rows.moves(verdicts)
        if len(from_slots):
            assert isinstance(self.target, CacheMover), (
                "trees are only drafted for targets that can move their cache"
            )
            self.target.move_cache(from_slots=from_slots, to_slots=to_slots)

    def _close(self, sequences: tuple[Sequence, ...]) -> None:
        """Make newly filled pages findable, and end what is finished."""
        for sequence in sequences:
            if sequence.error is None:
                self._batcher.register_full_pages(sequence)
            if sequence.finished:
                self._finish(sequence)

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
        self._next_id += 1
        drafts = self._drafts.enabled and request.params.num_draft_tokens != 0
        sequence = make_sequence(
            request,
            sequence_id=self._next_id,
            root=self._drafts.root_of(drafts=drafts),
            limits=self.limits,
            config=self.target.config,
            tokenizer=self.tokenizer,
            rule=self._rule,
        )
        self._sequences[sequence.sequence_id] = sequence
        self._batcher.add(sequence)
        return sequence.sequence_id

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

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end_cancelled_and_late(self) -> None:
        now = time.monotonic()
        for sequence in tuple(self._sequences.values()):
            deadline_s = sequence.request.deadline_s
            if client_left(sequence):
                self.cancel(sequence.sequence_id)
            elif deadline_s is not None and now >= deadline_s:
                sequence.finish_reason = "timeout"
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Give everything back and send the last output."""
        del self._sequences[sequence.sequence_id]
        sequence.metrics.num_pages = sequence.num_pages
        self._batcher.remove(sequence)
        self.drafter.release(sequence.sequence_id)
        self.scheduler.release(sequence.sequence_id)
        deliver_last(sequence)
