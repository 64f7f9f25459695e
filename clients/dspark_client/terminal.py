"""What the client shows: streamed text on standard output, dim remarks on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from dspark_client.connection import Answer, Generation

__all__ = ["remark", "show_stream", "summary", "table"]


def remark(text: str) -> None:
    """Write a remark to standard error, dim on a terminal."""
    dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def show_stream(generation: Generation) -> Answer:
    """Print an answer as it comes and return it. Raises as iterating over a generation does."""
    wrote = ""
    try:
        with contextlib.closing(iter(generation)) as deltas:  # Ctrl-C here ends the request there
            for delta in deltas:
                if delta.text:
                    print(delta.text, end="", flush=True)
                    wrote = delta.text
    finally:
        if wrote and not wrote.endswith("\n"):
            print(flush=True)
    return generation.answer


def summary(answer: Answer) -> str:
    """Say in one line how an answer was made."""
    parts = [
        f"{len(answer.output_ids)} tokens",
        f"{answer.tokens_per_second:.1f} tokens/s",
        f"first after {answer.first_token_s * 1e3:.0f} ms",
    ]
    if answer.metrics.get("num_draft_tokens"):
        parts.append(f"accepted length {answer.accepted_len:.2f}")
    if answer.finish_reason not in (None, "stop"):
        parts.append(f"ended by {answer.finish_reason}")
    return "[" + ", ".join(parts) + "]"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table; the first column is left-aligned, the others right-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
