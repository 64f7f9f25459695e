"""What the fields of a request mean: one checked `ParsedRequest`, or an error that names the field.

Pure: knows the wire contract and a tokenizer, and neither Triton nor the engine. Where fields come from is
`fields`' business, what chat messages look like `chat`'s.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError
from dspark.request import SAMPLING_FIELDS, SamplingParams
from dspark.serving.chat import parse_messages, parse_tools
from dspark.serving.contract import OUTPUTS
from dspark.serving.fields import read_fields

__all__ = ["ModelLimits", "ParsedRequest", "TextCodec", "parse_request"]

_PROMPT_FIELDS: Final = ("text_input", "input_ids", "messages")
_ONE_PROMPT: Final = "exactly one of text_input, input_ids and messages"
_LONGEST_ROLE: Final = 16  # characters of those that chat templates know
_ALL_OUTPUTS: Final = frozenset(spec.name for spec in OUTPUTS)
_PERF_OUTPUTS: Final = (
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "kv_cache_alloc_total_blocks",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "spec_decode_metrics",
)
_OUTPUTS_OF_FLAG: Final[dict[str, tuple[str, ...]]] = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_finish_reason": ("finish_reason",),
    "return_perf_metrics": _PERF_OUTPUTS,
}
_LOG_PROB_OUTPUTS: Final = frozenset({"cum_log_probs", "output_log_probs", "cumulative_logprob", "logprobs"})
# What clients of other models send, and the one value of it that is done here.
_NEUTRAL: Final[dict[str, object]] = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "return_context_logits": False,
    "return_generation_logits": False,
    "use_draft_logits": False,
}


class TextCodec(Protocol):
    """What parsing needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[Mapping[str, object]] | None = None
    ) -> Sequence[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the loaded model can take."""

    vocab_size: int
    max_context_len: int  # tokens, prompt and answer together
    longest_token_bytes: int | None = None  # of the vocabulary; None = not known
    most_messages: int | None = None  # that a chat can have, all of them empty; None = not known

    @classmethod
    def of(cls, *, vocab_size: int, max_context_len: int, tokenizer: TextCodec | None) -> ModelLimits:
        """Return the limits with the longest token of a tokenizer, and the shortest message of its chat template."""
        if tokenizer is None:
            return cls(vocab_size=vocab_size, max_context_len=max_context_len)
        longest = max(len(tokenizer.token_bytes(token)) for token in range(vocab_size))
        return cls(
            vocab_size=vocab_size,
            max_context_len=max_context_len,
            longest_token_bytes=longest or None,
            most_messages=max_context_len // _shortest_message(tokenizer),
        )


def _shortest_message(tokenizer: TextCodec) -> int:
    """Return how many tokens a message has at least, whatever its role: what the chat template writes around it."""

    def chat_len(roles: Sequence[str]) -> int:
        return len(tokenizer.apply_chat_template([{"role": role, "content": ""} for role in roles]))

    shortest = []
    for roles in (("user",), ("assistant",), ("user", "assistant"), ("system",), ("tool",)):
        with contextlib.suppress(RequestError):  # no template, or not one that takes this order
            shortest.append((chat_len(["user", *roles * 8]) - chat_len(["user"])) // (8 * len(roles)))
    return max(1, min(shortest, default=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request that may be submitted.

    With `cancels` it asks only that the running request of the same request id be cancelled; nothing else is
    set.
    """

    prompt_ids: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    cancels: bool = False
    echo_text: str | None = None  # put before the answer's text; None = the input is left out
    wanted: frozenset[str] = _ALL_OUTPUTS  # names of the outputs to fill
    timeout_ms: int = 0  # 0 = none
    priority: int = 0
    token_bytes: Callable[[int], bytes] | None = None  # of the tokenizer, where log probabilities are told


def parse_request(
    tensors: Mapping[str, npt.NDArray[np.generic]],
    parameters: Mapping[str, object],
    *,
    requested_outputs: Iterable[str],
    tokenizer: TextCodec | None,
    limits: ModelLimits,
) -> ParsedRequest:
    """Check everything a client sent and turn it into what the engine takes.

    Arguments:
        tensors: the inputs that were sent, [1, 1] or [1, n]; strings are object arrays of bytes.
        parameters: the request parameters (bool, int, float or str).
        requested_outputs: output names the client asked for; Triton names all of them when it asked for none.
        tokenizer: None where the model was loaded without one (then only `input_ids` work).
        limits: of the loaded model.

    Raises:
        RequestError: naming the field, the value and what is allowed.
    """
    fields = read_fields(tensors, parameters)
    requested = frozenset(requested_outputs)
    if fields.get("stop"):
        return ParsedRequest(cancels=True, wanted=requested)
    _refuse_what_is_not_done(fields)
    wanted = _wanted(fields, requested)
    prompt_ids = _prompt_ids(fields, tokenizer, limits)
    room = limits.max_context_len - len(prompt_ids)
    params = _sampling_params(
        fields, tokenizer, limits, room=room, log_probs=bool(wanted & _LOG_PROB_OUTPUTS)
    )
    _refuse_guide_without_tokenizer(params, tokenizer)
    timeout_ms = cast(int, fields.get("timeout_ms", 0))
    if timeout_ms < 0:
        raise RequestError("timeout_ms", timeout_ms, "a whole number >= 0 (0 = no limit)")
    return ParsedRequest(
        prompt_ids=prompt_ids,
        params=params,
        stream=cast(bool, fields.get("stream", False)),
        echo_text=_echo_text(fields, prompt_ids, tokenizer),
        wanted=wanted,
        timeout_ms=timeout_ms,
        priority=cast(int, fields.get("priority", 0)),
        token_bytes=None if tokenizer is None or "logprobs" not in wanted else tokenizer.token_bytes,
    )


def _prompt_ids(
    fields: Mapping[str, object], tokenizer: TextCodec | None, limits: ModelLimits
) -> tuple[int, ...]:
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise RequestError("text_input" if not given else given[1], given or None, _ONE_PROMPT)
    name = given[0]
    if "tools" in fields and name != "messages":
        raise RequestError("tools", fields["tools"], "tools beside messages, whose chat template takes them")
    if name == "input_ids":
        ids = cast("tuple[int, ...]", fields[name])
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestError(name, token, f"token ids from 0 to {limits.vocab_size - 1}")
    elif tokenizer is None:
        raise RequestError(name, fields[name], "input_ids only: the loaded target came without a tokenizer")
    elif name == "text_input":
        _check_text_len(name, (cast(str, fields[name]),), limits)
        ids = tuple(tokenizer.encode(cast(str, fields[name])))
    else:
        tools = parse_tools(cast(str, fields["tools"])) if "tools" in fields else None
        messages = parse_messages(cast(str, fields[name]), most=limits.most_messages)
        _check_text_len(name, _texts_of(messages), limits)
        _check_text_len("tools", (cast(str, fields.get("tools", "")),), limits)
        ids = tuple(tokenizer.apply_chat_template(messages, tools=tools or None))
    if not ids:
        raise RequestError(name, fields[name], "a prompt of at least one token")
    longest = limits.max_context_len - 1
    if len(ids) > longest:
        allowed = f"at most {longest} tokens (a context of {limits.max_context_len} less one for the answer)"
        raise RequestError(name, f"a prompt of {len(ids)} tokens", allowed)
    return ids


def _texts_of(messages: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield everything that a chat template may write of some messages (a known role perhaps in fewer letters)."""
    for message in messages:
        for name, value in message.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield text[_LONGEST_ROLE:] if name == "role" else text


def _check_text_len(name: str, texts: Iterable[str], limits: ModelLimits) -> None:
    """Refuse a text that cannot fit even in the longest tokens, before a second is spent on its tokens."""
    if limits.longest_token_bytes is None:
        return
    most = limits.max_context_len * limits.longest_token_bytes
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > most:
        allowed = f"at most {most} bytes (a context of {limits.max_context_len} tokens)"
        raise RequestError(name, f"a text of {num_bytes} bytes", allowed)


def _sampling_params(
    fields: Mapping[str, object],
    tokenizer: TextCodec | None,
    limits: ModelLimits,
    *,
    room: int,
    log_probs: bool,
) -> SamplingParams:
    """Build the sampling parameters; `room` is the number of tokens the context has left for the answer."""
    values = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}
    values["return_log_probs"] = log_probs
    for name in ("stop_words", "bad_words"):
        if fields.get(name) == ("",):  # how clients of TensorRT-LLM's ensemble say "none"
            fields = {**fields, name: ()}
            values.pop(name, None)
    if "max_tokens" not in values:
        values["max_tokens"] = min(SamplingParams().max_tokens, room)
    elif cast(int, values["max_tokens"]) > room:
        raise RequestError(
            "max_tokens", values["max_tokens"], f"1 to {room} (what the prompt leaves of the context)"
        )
    if "end_id" in values and cast(int, values["end_id"]) >= limits.vocab_size:
        raise RequestError("end_id", values["end_id"], f"-1 (none) to {limits.vocab_size - 1}")
    for name in ("stop_words", "bad_words"):
        if fields.get(name) and tokenizer is None:
            raise RequestError(name, fields[name], "nothing: the loaded target came without a tokenizer")
        _check_text_len(name, cast("tuple[str, ...]", fields.get(name, ())), limits)
    if tokenizer is not None:
        values["bad_words_ids"] = _bad_words_ids(
            cast("tuple[str, ...]", fields.get("bad_words", ())), tokenizer
        )
    return SamplingParams(**values)  # type: ignore[arg-type]


def _bad_words_ids(words: Iterable[str], tokenizer: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Spell every word as it is and as it stands after a space; both must not be produced."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word:
            raise RequestError("bad_words", word, "non-empty texts")
        for text in (word, " " + word):
            spellings[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(spellings)


def _refuse_guide_without_tokenizer(params: SamplingParams, tokenizer: TextCodec | None) -> None:
    kind = params.guided_decoding_guide_type
    if kind is not None and tokenizer is None:
        raise RequestError(
            "guided_decoding_guide_type", kind, "nothing: the loaded target came without a tokenizer"
        )


def _refuse_what_is_not_done(fields: Mapping[str, object]) -> None:
    for name, value in _NEUTRAL.items():
        if fields.get(name, value) != value:
            raise RequestError(name, fields[name], f"{str(value).lower()}: more is not done here")


def _wanted(fields: Mapping[str, object], requested: frozenset[str]) -> frozenset[str]:
    """Outputs to fill: those that a flag asks for, and those that the client named (rather than all)."""
    if requested != _ALL_OUTPUTS:
        return requested
    wanted = {"text_output", "output_ids"}
    for flag, outputs in _OUTPUTS_OF_FLAG.items():
        if fields.get(flag):
            wanted.update(outputs)
    return frozenset(wanted)


def _echo_text(
    fields: Mapping[str, object], prompt_ids: tuple[int, ...], tokenizer: TextCodec | None
) -> str | None:
    if fields.get("exclude_input_in_output", True):
        return None
    if "text_input" in fields:
        return cast(str, fields["text_input"])
    return "" if tokenizer is None else tokenizer.decode(prompt_ids)
