"""Finds tool calls in an answer's text, as it streams: `<tool_call>` JSON `</tool_call>`, the form of Qwen and Hermes.

Whatever cannot be read as a call stays text, so nothing of an answer is ever lost.
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

__all__ = ["ToolCallFinder", "tool_call"]

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class ToolCallFinder:
    """Takes pieces of text, gives back the text that is no call, and the calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Take a piece; return the text that may be shown and the calls that are complete."""
        self._held += text
        shown, calls = "", []
        while True:
            mark = _CLOSE if self._inside else _OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            if not self._inside:
                shown += before
            else:
                call = tool_call(before)
                if call is None:
                    shown += _OPEN + before + _CLOSE
                else:
                    calls.append(call)
                    self.num_calls += 1
            self._inside = not self._inside
        if not self._inside:
            safe = len(self._held) - _overlap(self._held)
            shown, self._held = shown + self._held[:safe], self._held[safe:]
        return shown, calls

    def finish(self) -> str:
        """Return what was held back for a call that never became complete."""
        held = (_OPEN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return held


def tool_call(text: str) -> dict[str, Any] | None:
    """Return the call that a JSON text holds, in OpenAI's form; None when it is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", given.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": given["name"], "arguments": arguments},
    }


def _overlap(text: str) -> int:
    """Return how many characters at the end of a text could begin the opening mark."""
    for length in range(min(len(text), len(_OPEN) - 1), 0, -1):
        if _OPEN.startswith(text[-length:]):
            return length
    return 0
