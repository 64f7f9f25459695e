"""The commit rules: what of a verdict becomes part of the answer, and what ends it.

Tokens are taken one by one, so that a stop inside an accepted run ends the answer right there; whatever was accepted
behind it is never seen by anyone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from dspark.drafters.interface import DraftBlock
from dspark.engine.batching import StepPlan
from dspark.engine.delivery import deliver
from dspark.engine.judging import judge_drafts, judge_first_token
from dspark.engine.log_probs import token_log_probs
from dspark.engine.sequence import Sequence
from dspark.engine.stats import EngineStats
from dspark.engine.step_batch import StepRows
from dspark.errors import DSparkError
from dspark.executors.interface import Float32, TargetOutput
from dspark.request import RequestOutput, TokenLogProb
from dspark.sampling.verification import Verdict

__all__ = ["Committer", "append_tokens"]

log = logging.getLogger("dspark.engine")


class Committer:
    """Judges every sequence's rows and appends what was accepted; one that fails, fails alone.

    Arguments:
        max_context_len: tokens of one sequence, prompt and answer.
        stats: tokens and failures are counted here.
    """

    def __init__(self, *, max_context_len: int, stats: EngineStats) -> None:
        self._max_context_len = max_context_len
        self._stats = stats

    def commit(
        self, plan: StepPlan, block: DraftBlock, rows: StepRows, output: TargetOutput, *, started_ns: int
    ) -> list[Verdict | None]:
        """Advance every sequence of the pass and emit what it gained.

        Arguments:
            started_ns: when the step began, on time.time_ns()'s clock.

        Returns:
            The verdict of each decoding sequence, None where it failed.
        """
        now_ns = time.time_ns()
        self._advance_prefill(plan, started_ns)
        verdicts: list[Verdict | None] = []
        confidence = block.confidence()
        for index, sequence in enumerate(plan.decoding):
            num_drafts = rows.num_drafts(index)
            judge = partial(
                judge_drafts,
                sequence,
                block,
                index,
                num_drafts=num_drafts,
                span=rows.logit_span(index),
                output=output,
            )
            verdict = self._take(sequence, judge, output.logits[rows.logit_span(index)], now_ns)
            if verdict is not None:
                sequence.record_step(
                    block, confidence, index, verify_len=num_drafts, accepted=verdict.accepted
                )
            verdicts.append(verdict)
        last = ((i, c) for i, c in enumerate(plan.prefill, start=len(plan.decoding)) if c.last)
        for (index, chunk), row in zip(last, rows.first_token_rows, strict=True):
            judge = partial(judge_first_token, chunk.sequence, index, row, output)
            self._take(chunk.sequence, judge, output.logits[row : row + 1], now_ns)
        return verdicts

    def _advance_prefill(self, plan: StepPlan, started_ns: int) -> None:
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if sequence.metrics.first_scheduled_time_ns == 0:
                sequence.metrics.first_scheduled_time_ns = started_ns
                self._stats.num_cached_prompt_tokens += chunk.start
            sequence.cached_len += chunk.count
            self._stats.num_prompt_tokens += chunk.count

    def _take(
        self, sequence: Sequence, judge: Callable[[], Verdict], logits: Float32, now_ns: int
    ) -> Verdict | None:
        """Judge, append and emit; an error in one sequence's own path ends that sequence only.

        Arguments:
            logits: [n, V] rows of the anchor and the drafts, which the sequence's tokens are drawn from.
        """
        try:
            verdict = judge()
            decoded = sequence.output_len > 0
            committed, delta = append_tokens(sequence, verdict, max_context_len=self._max_context_len)
            if decoded:
                sequence.cached_len += 1 + min(verdict.accepted, committed)
            token_ids = tuple(sequence.token_ids[len(sequence.token_ids) - committed :])
            log_probs = _log_probs(sequence, logits, verdict, token_ids)
        except Exception as error:
            if not isinstance(error, DSparkError):
                log.exception("request %d failed", sequence.sequence_id)
            sequence.error = error
            self._stats.num_failed += 1
            return None
        metrics = sequence.metrics
        metrics.last_token_time_ns = now_ns
        if metrics.first_token_time_ns == 0:
            metrics.first_token_time_ns = now_ns
        self._stats.num_generation_tokens += committed
        if sequence.finished:  # these leave with the last output
            sequence.last_delta = (token_ids, delta)
            sequence.last_log_probs = log_probs
        else:
            deliver(
                sequence,
                RequestOutput(
                    request_id=sequence.sequence_id, token_ids=token_ids, text=delta, log_probs=log_probs
                ),
            )
        return verdict


def _log_probs(
    sequence: Sequence, logits: Float32, verdict: Verdict, token_ids: tuple[int, ...]
) -> tuple[TokenLogProb, ...]:
    params = sequence.request.params
    if not params.wants_log_probs:
        return ()
    if verdict.path is not None:
        logits = logits[[0, *(node + 1 for node in verdict.path)]]
    return token_log_probs(logits, token_ids, num_alternatives=params.logprobs)


def append_tokens(sequence: Sequence, verdict: Verdict, *, max_context_len: int) -> tuple[int, str | None]:
    """Append a verdict's tokens up to the first one that ends the answer.

    Returns:
        How many tokens were appended, and the text that may leave now (None without a tokenizer).

    An end token belongs to the token ids but not to the text. A stop string ends the answer at the token that
    completes it.
    """
    params = sequence.request.params
    end_ids = sequence.sampler.end_ids
    committed, text = 0, ""
    for token in verdict.token_ids:
        sequence.token_ids.append(token)
        committed += 1
        if token in end_ids:
            sequence.finish_reason = "stop"
        elif sequence.assembler is not None:
            delta, stopped = sequence.assembler.push(token)
            text += delta
            if stopped:
                sequence.finish_reason = "stop"
        if sequence.finish_reason is None and sequence.sampler.grammar_ends(sequence.token_ids[-committed:]):
            sequence.finish_reason = "stop"
        if sequence.finish_reason is None and (
            sequence.output_len >= params.max_tokens or len(sequence.token_ids) >= max_context_len
        ):
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            break
    sequence.sampler.commit(sequence.token_ids[-committed:])
    return committed, (text if sequence.assembler is not None else None)
