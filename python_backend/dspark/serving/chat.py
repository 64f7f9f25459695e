"""Chat messages and tools as they come over the wire -> what a chat template takes.

The form is OpenAI's: besides role and content an assistant's message may hold `tool_calls`, a tool's one
`tool_call_id` and `name`; content may be a list of text parts. Which roles and fields make sense together is
the template's own business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from dspark.errors import RequestError
from dspark.serving.fields import text_of

__all__ = ["parse_messages", "parse_tools"]

_MESSAGES: Final = 'a JSON list of at least one {"role": text, "content": text}'
_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_TOOLS: Final = 'a JSON list of {"type": "function", "function": {"name": text, ...}}'


def parse_messages(text: str, *, most: int | None = None) -> list[dict[str, object]]:
    """Return the messages that a text holds.

    Arguments:
        most: so many fit into a context; None = not known.

    Raises:
        RequestError: on field `messages`.
    """
    given = _json("messages", text, _MESSAGES)
    if not isinstance(given, list) or not given:
        raise RequestError("messages", text, _MESSAGES)
    if most is not None and len(given) > most:
        raise RequestError("messages", f"a chat of {len(given)} messages", f"at most {most} (in one context)")
    return [_message(message) for message in given]


def parse_tools(text: str) -> list[dict[str, object]]:
    """Return the tools that a text holds; an empty list means none.

    Raises:
        RequestError: on field `tools`.
    """
    given = _json("tools", text, _TOOLS)
    if not isinstance(given, list):
        raise RequestError("tools", text, _TOOLS)
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise RequestError("tools", tool, _TOOLS)
    return given


def _json(name: str, text: str, allowed: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(name, text, f"{allowed} ({error})") from None


def _message(given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        raise RequestError("messages", given, _MESSAGES)
    message = {key: value for key, value in given.items() if value is not None}
    unknown = sorted(set(message) - _KEYS)
    if unknown:
        raise RequestError("messages", unknown[0], f"messages with keys among {', '.join(sorted(_KEYS))}")
    calls = message.get("tool_calls")
    if "role" not in message or ("content" not in message and not calls):
        raise RequestError("messages", given, _MESSAGES)
    for key in ("role", "name", "tool_call_id", "reasoning_content"):
        if key in message:
            message[key] = text_of("messages", message[key])
    message["content"] = _content(message.get("content", ""))
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls)
    return message


def _content(given: object) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if not isinstance(given, list):
        return text_of("messages", given)
    parts = []
    for part in given:
        if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
            raise RequestError(
                "messages", part, 'content as text, or as a list of {"type": "text", "text": text}'
            )
        parts.append(text_of("messages", part["text"]))
    return "".join(parts)


def _tool_calls(given: object) -> list[dict[str, object]]:
    """Return tool calls with their arguments as objects, which templates want (OpenAI sends them as JSON text)."""
    allowed = 'tool_calls as a list of {"type": "function", "function": {"name": text, "arguments": JSON}}'
    if not isinstance(given, list):
        raise RequestError("messages", given, allowed)
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("messages", call, allowed)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json("messages", arguments or "{}", allowed)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
