"""From the model's parts to OpenAI's objects: choices, deltas, log probabilities, usage. Pure.

One `Choice` follows one answer; `chat` ones give messages, the others text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from dspark.gateway.requests import Ask
from dspark.gateway.tool_calls import ToolCallFinder, tool_call
from dspark.gateway.triton import Part, TokenFigures

__all__ = ["Choice", "usage_of"]

# A limit of time or a cancel by request id cuts the answer short, as the limit of tokens does.
_FINISH: Final = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "length"}


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer as it comes."""

    ask: Ask
    index: int
    chat: bool
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    _begun: bool = False
    _text: str = ""
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _rows: list[Any] = field(default_factory=list)
    _finder: ToolCallFinder = field(default_factory=ToolCallFinder)
    _finish: str | None = None

    def take(self, part: Part) -> dict[str, Any] | None:
        """Add one part; return the streamed choice that tells it, None when there is nothing to tell."""
        self.num_input_tokens = part.num_input_tokens
        self.num_output_tokens += part.num_output_tokens
        offset = len(self._text)
        text, calls = self._split(part)
        self._text += text
        first_call = len(self._calls)
        self._calls += calls
        self._rows += part.log_probs
        if part.finish_reason is not None:
            self._finish = "tool_calls" if self._calls else _FINISH[part.finish_reason]
        if not (text or calls or self._finish or not self._begun):
            return None
        streamed: dict[str, Any] = {"index": self.index, "finish_reason": self._finish}
        if self.chat:
            streamed["delta"] = self._delta(text, calls, first_call)
        else:
            streamed["text"] = text
        streamed["logprobs"] = self._log_probs(part.log_probs, offset)
        self._begun = True
        return streamed

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is complete."""
        whole: dict[str, Any] = {"index": self.index, "finish_reason": self._finish}
        if self.chat:
            content = self._text if self._text or not self._calls else None
            whole["message"] = {"role": "assistant", "content": content, "refusal": None}
            if self._calls:
                whole["message"]["tool_calls"] = self._calls
        else:
            whole["text"] = self._text
        whole["logprobs"] = self._log_probs(self._rows, 0)
        return whole

    def _split(self, part: Part) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a part that is shown, and the tool calls in it."""
        if not self.ask.tools:
            return part.text, []
        if self.ask.forced_call:  # all of the answer is one call
            self._finder._held += part.text
            if part.finish_reason is None:
                return "", []
            whole = self._finder.finish()
            call = tool_call(whole)
            return ("", [call]) if call is not None else (whole, [])
        text, calls = self._finder.push(part.text)
        if part.finish_reason is not None:
            text += self._finder.finish()
        return text, calls

    def _delta(self, text: str, calls: list[dict[str, Any]], first_call: int) -> dict[str, Any]:
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": first_call + k, **call} for k, call in enumerate(calls)]
        return delta

    def _log_probs(
        self, rows: list[tuple[TokenFigures, list[TokenFigures]]], offset: int
    ) -> dict[str, Any] | None:
        wanted = self.ask.log_probs
        if wanted is None:
            return None
        if self.chat:
            content = [
                {**_entry(own), "top_logprobs": [_entry(one) for one in top[:wanted]]} for own, top in rows
            ]
            return {"content": content, "refusal": None}
        tokens = [own.raw.decode("utf-8", "replace") for own, _ in rows]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [own.log_prob for own, _ in rows],
            "top_logprobs": [
                {one.raw.decode("utf-8", "replace"): one.log_prob for one in top[:wanted]} for _, top in rows
            ],
            "text_offset": offsets,
        }


def usage_of(choices: list[Choice], *, num_choices: int) -> dict[str, Any]:
    """Return the tokens that all answers took; a prompt counts once for its choices."""
    prompt = sum(choice.num_input_tokens for choice in choices[::num_choices])
    completion = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _entry(figures: TokenFigures) -> dict[str, Any]:
    return {
        "token": figures.raw.decode("utf-8", "replace"),
        "logprob": figures.log_prob,
        "bytes": list(figures.raw),
    }
