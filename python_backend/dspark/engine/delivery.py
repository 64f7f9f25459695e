"""What leaves the engine: outputs to the receiver of each request, the last one with everything it still owes."""

from __future__ import annotations

import logging

from dspark.engine.sequence import Sequence
from dspark.errors import EngineError
from dspark.request import RequestOutput

__all__ = ["client_left", "deliver", "deliver_last"]

log = logging.getLogger("dspark.engine")


def deliver(sequence: Sequence, output: RequestOutput) -> None:
    """Hand one output to the request's receiver; a receiver that fails ends its request."""
    try:
        sequence.request.emit(output)
    except Exception:
        log.exception("request %d: its receiver failed; the request is dropped", sequence.sequence_id)
        if not output.final and not sequence.finished:
            sequence.error = EngineError("the receiver of this request failed")


def deliver_last(sequence: Sequence) -> None:
    """Send the output that says how the request ended, with the tokens, text, counts and records it still owes."""
    token_ids, delta = sequence.last_delta
    if sequence.assembler is not None and sequence.error is None:
        delta = (delta or "") + sequence.assembler.finish()
    deliver(
        sequence,
        RequestOutput(
            request_id=sequence.sequence_id,
            token_ids=token_ids,
            text=delta,
            log_probs=sequence.last_log_probs,
            finish_reason=None if sequence.error is not None else sequence.finish_reason,
            error=sequence.error,
            metrics=sequence.metrics,
            steps=tuple(sequence.records),
        ),
    )


def client_left(sequence: Sequence) -> bool:
    """Return whether the request's client is gone; one that cannot tell counts as gone."""
    is_cancelled = sequence.request.is_cancelled
    if is_cancelled is None:
        return False
    try:
        return is_cancelled()
    except Exception:
        log.exception("a request could not tell whether its client is still there; it is cancelled")
        return True
