"""`dspark-client chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from dspark_client.connection import Connection, RequestFailedError
from dspark_client.terminal import remark, show_stream, summary

__all__ = ["chat"]

_HELP = "/reset forgets the conversation, /retry asks again, /quit (or Ctrl-D) leaves; Ctrl-C stops an answer"


def chat(connection: Connection, *, system: str | None, options: Mapping[str, object]) -> int:
    """Read lines, stream answers, keep the history; return the exit status.

    Raises:
        ServerUnavailableError: the server went away.
    """
    with contextlib.suppress(ImportError):  # line editing and history where Python has it
        import readline  # noqa: F401
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    remark(_HELP)
    while True:
        try:
            line = input("you: " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            messages = list(opening)
            remark("the conversation is forgotten")
        elif line == "/retry":
            if messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if messages and messages[-1]["role"] == "user":
                _answer(connection, messages, options)
        elif line.startswith("/"):
            remark(_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            _answer(connection, messages, options)


def _answer(connection: Connection, messages: list[dict[str, str]], options: Mapping[str, object]) -> None:
    """Stream one answer and add it to the history; one that fails takes its question back out."""
    generation = connection.generate(messages, options=options)
    try:
        show_stream(generation)
        remark(summary(generation.answer))
    except KeyboardInterrupt:
        remark("[stopped]")
    except RequestFailedError as error:
        remark(f"[{error}]")
        messages.pop()
        return
    messages.append({"role": "assistant", "content": generation.answer.text})
