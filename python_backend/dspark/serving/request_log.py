"""One line of JSON in the server's log for every request that ended, with the id that its client chose."""

from __future__ import annotations

import json
import logging
from typing import Final

from dspark.request import RequestOutput
from dspark.serving.stream import wire_error

__all__ = ["log_end", "log_refusal"]

_log: Final = logging.getLogger("dspark.requests")


def log_end(
    output: RequestOutput,
    *,
    client_id: str,
    num_input_tokens: int,
    num_output_tokens: int,
    first_token_s: float | None,
    total_s: float,
) -> None:
    """Log how a request ended that the engine had taken.

    Arguments:
        output: its last.
        first_token_s, total_s: seconds since it came; None = there was no token.
    """
    entry: dict[str, object] = {
        "id": client_id,
        "request": output.request_id,
        "input_tokens": num_input_tokens,
        "output_tokens": num_output_tokens,
        "first_token_ms": None if first_token_s is None else round(1e3 * first_token_s, 2),
        "total_ms": round(1e3 * total_s, 2),
    }
    if output.metrics is not None:
        entry["drafts_verified"] = output.metrics.num_draft_tokens
        entry["drafts_accepted"] = output.metrics.num_accepted_draft_tokens
    if output.error is None:
        entry["end"] = output.finish_reason
        _log.info("request %s", json.dumps(entry))
    else:
        code, message = wire_error(output.error)
        entry.update(end="error", code=code, error=message[:500])
        _log.warning("request %s", json.dumps(entry))


def log_refusal(error: Exception, *, client_id: str) -> None:
    """Log a request that the engine never saw."""
    code, message = wire_error(error)
    entry = {"id": client_id, "end": "refused", "code": code, "error": message[:500]}
    _log.info("request %s", json.dumps(entry))
