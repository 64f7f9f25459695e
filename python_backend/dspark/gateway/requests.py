"""Bodies of `/v1/chat/completions` and `/v1/completions` -> what the model is asked. Pure.

Ranges are the model's to check: its errors name the field too. Here is checked what it never sees, and that
nothing is dropped without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dspark.gateway.errors import ApiError, refused

__all__ = ["Ask", "parse_chat", "parse_completion"]

_MOST_CHOICES: Final = 16
_SAME_NAME: Final = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty",
    # Ours, sent through the clients' extra_body.
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "end_id", "bad_words", "stop_token_ids",
    "num_draft_tokens", "priority", "timeout_ms", "guided_decoding",
)  # fmt: skip
# Known, and without a meaning here.
_IGNORED: Final = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
)  # fmt: skip
_COMMON: Final = ("model", "stream", "stream_options", "n", "seed", "stop", "max_tokens", "logprobs")
_CHAT: Final = (
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format",
)  # fmt: skip
_COMPLETION: Final = ("prompt", "echo", "best_of", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request. Each prompt gives `num_choices` answers, in this order."""

    model: str
    prompts: list[dict[str, object]]  # the prompt's fields under the contract's names
    sampling: dict[str, object]
    num_choices: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    log_probs: int | None = None  # alternatives per token; None = no log probabilities
    tools: list[dict[str, Any]] = field(default_factory=list)  # that the answer may call
    forced_call: bool = False  # the answer is one call and nothing else


def parse_chat(body: object) -> Ask:
    """Return what a chat completion asks.

    Raises:
        ApiError: 400, naming the field.
    """
    given = _checked(body, (*_COMMON, *_CHAT))
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", messages, "a list of at least one message")
    prompt: dict[str, object] = {"messages": json.dumps([_message(message) for message in messages])}
    sampling = _sampling(given)
    tools, forced = _tools(given)
    if tools:
        prompt["tools"] = json.dumps(tools)
    guide = _forced_call_guide(tools, given["tool_choice"]) if forced else _response_format(given)
    sampling.update(guide)
    return Ask(
        prompts=[prompt],
        sampling=sampling,
        log_probs=_chat_log_probs(given),
        tools=tools,
        forced_call=forced,
        **_common(given),
    )


def parse_completion(body: object) -> Ask:
    """Return what a completion asks.

    Raises:
        ApiError: 400, naming the field.
    """
    given = _checked(body, (*_COMMON, *_COMPLETION))
    if given.get("suffix"):
        raise refused("suffix", given["suffix"], "null: the model does not fill in")
    if given.get("best_of") not in (None, given.get("n") or 1):
        raise refused("best_of", given["best_of"], "null, or the same as n")
    sampling = {"max_tokens": 16, **_sampling(given)}
    log_probs = given.get("logprobs")
    if log_probs is not None and (isinstance(log_probs, bool) or not isinstance(log_probs, int)):
        raise refused("logprobs", log_probs, "a whole number")
    if given.get("echo"):
        if log_probs is not None:
            raise refused("echo", True, "false together with logprobs: prompts have none here")
        sampling["exclude_input_in_output"] = False
    return Ask(
        prompts=_prompts(given.get("prompt")), sampling=sampling, log_probs=log_probs, **_common(given)
    )


def _checked(body: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that were given; every one must be known."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("logit_bias"):
        raise refused("logit_bias", given["logit_bias"], "an empty object: not done here")
    if given.get("modalities", ["text"]) != ["text"]:
        raise refused("modalities", given["modalities"], '["text"]')
    for name in given:
        if name not in (*known, *_SAME_NAME, *_IGNORED, "logit_bias", "modalities"):
            raise ApiError(
                400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
            )
    if not isinstance(given.get("model"), str):
        raise refused("model", given.get("model"), "the name of a model; GET /v1/models lists them")
    return given


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise refused("stream_options", options, '{"include_usage": true or false}')
    if options and not given.get("stream"):
        raise refused("stream_options", options, "null when stream is false")
    return {
        "model": given["model"],
        "num_choices": _whole(given, "n", 1, _MOST_CHOICES) or 1,
        "seed": _seed(given),
        "stream": _flag(given, "stream"),
        "include_usage": bool(options.get("include_usage")),
    }


def _sampling(given: Mapping[str, Any]) -> dict[str, object]:
    sampling: dict[str, object] = {name: given[name] for name in _SAME_NAME if name in given}
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name wins
        if name in given:
            sampling["max_tokens"] = _whole(given, name, 1, None)
    stop = given.get("stop")
    if stop is not None:
        if not (isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop))):
            raise refused("stop", stop, "a text or a list of texts")
        sampling["stop_words"] = [stop] if isinstance(stop, str) else stop
    return sampling


def _seed(given: Mapping[str, Any]) -> int | None:
    seed = _whole(given, "seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**64  # OpenAI's seeds are signed


def _whole(given: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise refused(name, value, f"a whole number from {low}" + ("" if high is None else f" to {high}"))
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise refused(name, value, "true or false")
    return value


def _chat_log_probs(given: Mapping[str, Any]) -> int | None:
    top = _whole(given, "top_logprobs", 0, 20)
    if not _flag(given, "logprobs"):
        if top:
            raise refused("top_logprobs", top, "null unless logprobs is true")
        return None
    return top or 0


def _message(message: object) -> object:
    """Return a message under the names that chat templates know."""
    if isinstance(message, dict) and message.get("role") == "developer":
        message = {**message, "role": "system"}
    if isinstance(message, dict):
        message = {
            key: value for key, value in message.items() if key not in ("refusal", "annotations", "audio")
        }
    return message


def _prompts(prompt: object) -> list[dict[str, object]]:
    """Return the prompts' fields: one text, a list of texts, one list of token ids, or a list of such lists."""
    allowed = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
    if isinstance(prompt, str):
        return [{"text_input": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise refused("prompt", prompt, allowed)
    if all(isinstance(one, str) for one in prompt):
        return [{"text_input": one} for one in prompt]
    lists = [prompt] if all(type(one) is int for one in prompt) else prompt
    for one in lists:
        if not isinstance(one, list) or not one or not all(type(token) is int for token in one):
            raise refused("prompt", prompt, allowed)
    return [{"input_ids": one} for one in lists]


def _response_format(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the guide of a response format."""
    wanted = given.get("response_format", {"type": "text"})
    allowed = '{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}'
    if not isinstance(wanted, dict):
        raise refused("response_format", wanted, allowed)
    match wanted.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"guided_decoding_guide_type": "json"}
        case "json_schema":
            schema = wanted.get("json_schema")
            if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
                return {
                    "guided_decoding_guide_type": "json_schema",
                    "guided_decoding_guide": json.dumps(schema["schema"]),
                }
    raise refused("response_format", wanted, allowed)


def _tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that may be called, and whether one of them must be."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise refused("tools", tools, "a list of tools")
    if choice == "none" or not tools:
        if choice not in ("none", "auto"):
            raise refused("tool_choice", choice, '"none" or "auto" without tools')
        return [], False
    if choice == "auto":
        return tools, False
    if choice != "required" and not (isinstance(choice, dict) and isinstance(choice.get("function"), dict)):
        allowed = '"none", "auto", "required", or {"type": "function", "function": {"name": text}}'
        raise refused("tool_choice", choice, allowed)
    return tools, True


def _forced_call_guide(tools: list[dict[str, Any]], choice: object) -> dict[str, object]:
    """Return the guide that makes the answer one call, as JSON."""
    functions = [
        tool["function"]
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    if isinstance(choice, dict):
        name = choice["function"].get("name")
        functions = [function for function in functions if function.get("name") == name]
        if not functions:
            raise refused("tool_choice", choice, "the name of one of the tools")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.get("name")},
                "arguments": function.get("parameters", {"type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls}),
    }
