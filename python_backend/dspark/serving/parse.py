"""Request tensors, request parameters and `sampling_parameters` JSON -> one checked `ParsedRequest`.

Pure: knows the wire contract and a tokenizer, and neither Triton nor the engine. Where a field is given
twice the tensor wins, then the request parameter, then the JSON object. Unknown request parameters are left
alone (Triton forwards headers and its own options as such); an unknown key in the JSON object is refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError
from dspark.request import SAMPLING_FIELDS, SamplingParams
from dspark.serving.contract import ALIASES, INPUTS, INPUTS_BY_NAME, OUTPUTS, InputSpec

__all__ = ["ModelLimits", "ParsedRequest", "TextCodec", "parse_request"]

_PROMPT_FIELDS: Final = ("text_input", "input_ids", "messages")
_ONE_PROMPT: Final = "exactly one of text_input, input_ids and messages"
_ALL_OUTPUTS: Final = frozenset(spec.name for spec in OUTPUTS)
_PERF_OUTPUTS: Final = (
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "spec_decode_metrics",
)
_OUTPUTS_OF_FLAG: Final[dict[str, tuple[str, ...]]] = {
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_finish_reason": ("finish_reason",),
    "return_perf_metrics": _PERF_OUTPUTS,
}
_LOG_PROB_OUTPUTS: Final = frozenset({"cum_log_probs", "output_log_probs"})
_INT_RANGE: Final = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}


class TextCodec(Protocol):
    """What parsing needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]]) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the loaded model can take."""

    vocab_size: int
    max_context_len: int  # tokens, prompt and answer together


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
    fields = _read_fields(tensors, parameters)
    requested = frozenset(requested_outputs)
    if fields.get("stop"):
        return ParsedRequest(cancels=True, wanted=requested)
    _refuse_log_probs(fields, requested)

    prompt_ids = _prompt_ids(fields, tokenizer, limits)
    room = limits.max_context_len - len(prompt_ids)
    params = _sampling_params(fields, tokenizer, limits, room=room)
    timeout_ms = cast(int, fields.get("timeout_ms", 0))
    if timeout_ms < 0:
        raise RequestError("timeout_ms", timeout_ms, "a whole number >= 0 (0 = no limit)")
    return ParsedRequest(
        prompt_ids=prompt_ids,
        params=params,
        stream=cast(bool, fields.get("stream", False)),
        echo_text=_echo_text(fields, prompt_ids, tokenizer),
        wanted=_wanted(fields, requested),
        timeout_ms=timeout_ms,
        priority=cast(int, fields.get("priority", 0)),
    )


# ---- where fields come from ------------------------------------------------------------------------------


def _read_fields(
    tensors: Mapping[str, npt.NDArray[np.generic]], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return the value of every field that was given, under its canonical name, already of its own type."""
    from_tensors = {name: _from_tensor(INPUTS_BY_NAME[name], array) for name, array in tensors.items()}
    from_parameters = {
        name: _from_value(INPUTS_BY_NAME[name], value)
        for name, value in parameters.items()
        if name in INPUTS_BY_NAME and value is not None
    }
    text = from_tensors.pop("sampling_parameters", None)
    fallback = from_parameters.pop("sampling_parameters", None)
    from_json = _from_json(cast("str | None", fallback if text is None else text))

    fields: dict[str, object] = {}
    for source in (from_json, from_parameters, from_tensors):  # the later wins
        fields.update(_canonical(source))
    return fields


def _canonical(source: Mapping[str, object]) -> dict[str, object]:
    """Rename aliases; two spellings of one field must agree. `stop` with texts is `stop_words`."""
    fields: dict[str, object] = {}
    for sent_as, value in source.items():
        name = ALIASES.get(sent_as, sent_as)
        if sent_as == "stop" and not isinstance(value, bool):
            name = "stop_words"
        if name in fields and fields[name] != value:
            raise RequestError(
                sent_as, value, f"what its other spelling says ({fields[name]!r}), or only one of the two"
            )
        fields[name] = value
    return fields


def _from_json(text: str | None) -> dict[str, object]:
    if text is None or not text.strip():
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("sampling_parameters", text, f"a JSON object ({error})") from None
    if not isinstance(given, dict):
        raise RequestError("sampling_parameters", text, "a JSON object")
    fields: dict[str, object] = {}
    for name, value in given.items():
        spec = INPUTS_BY_NAME.get(name)
        if spec is None or name == "sampling_parameters":
            known = ", ".join(sorted(i.name for i in INPUTS if i.name != "sampling_parameters"))
            raise RequestError("sampling_parameters", name, f"an object with keys among: {known}")
        if value is not None:
            fields[name] = _from_value(spec, value)
    return fields


# ---- one value -------------------------------------------------------------------------------------------


def _from_tensor(spec: InputSpec, array: npt.NDArray[np.generic]) -> object:
    if array.ndim != 2 or array.shape[0] != 1 or (not spec.many and array.shape[1] != 1):
        raise RequestError(
            spec.name, f"a tensor of shape {list(array.shape)}", f"shape [1, {'n' if spec.many else '1'}]"
        )
    if spec.wire_type == "STRING":
        words = tuple(_text(spec.name, word) for word in array[0])
        return words if spec.many else words[0]
    if spec.wire_type == "FP32":
        # The shortest decimal that is this float32: 0.7 sent as FP32 means 0.7, as it does in JSON.
        return float(str(array[0, 0]))
    values = tuple(array[0].tolist())
    return values if spec.many else values[0]


def _from_value(spec: InputSpec, value: object) -> object:
    """Check a request parameter or JSON value; numbers may come as text (vLLM's clients send them so)."""
    if spec.name == "stop":
        return value if isinstance(value, bool) else _words(spec.name, value)
    if spec.name == "messages" and isinstance(value, list):
        return json.dumps(value)
    if spec.many:
        return _words(spec.name, value) if spec.wire_type == "STRING" else _ids(spec.name, value)
    if spec.wire_type == "STRING":
        return _text(spec.name, value)
    if spec.wire_type == "BOOL":
        return _truth(spec.name, value)
    return _real(spec.name, value) if spec.wire_type == "FP32" else _whole(spec.name, value, spec.wire_type)


def _text(name: str, value: object) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
        if isinstance(value, str):
            value.encode("utf-8")
            return value
    except UnicodeError as error:
        raise RequestError(name, value, f"text in valid UTF-8 ({error.reason})") from None  # type: ignore[attr-defined]
    raise RequestError(name, value, "text")


def _json_list(value: object) -> object:
    """Return the list that a text holds as JSON, or the value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _words(name: str, value: object) -> tuple[str, ...]:
    value = _json_list(value)
    if isinstance(value, list):
        return tuple(_text(name, word) for word in value)
    return (_text(name, value),)


def _ids(name: str, value: object) -> tuple[int, ...]:
    value = _json_list(value)
    if not isinstance(value, list):
        raise RequestError(name, value, "a list of token ids")
    return tuple(_whole(name, token, "INT32") for token in value)


def _truth(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int) and str(value).strip().lower() in ("true", "false", "1", "0"):
        return str(value).strip().lower() in ("true", "1")
    raise RequestError(name, value, "true or false")


def _whole(name: str, value: object, wire_type: str) -> int:
    low, high = _INT_RANGE[wire_type]
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if number is None or not low <= number <= high:
        raise RequestError(name, value, f"a whole number from {low} to {high}")
    return number


def _real(name: str, value: object) -> float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise RequestError(name, value, "a number")


# ---- what the fields mean --------------------------------------------------------------------------------


def _prompt_ids(
    fields: Mapping[str, object], tokenizer: TextCodec | None, limits: ModelLimits
) -> tuple[int, ...]:
    given = [name for name in _PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise RequestError("text_input" if not given else given[1], given or None, _ONE_PROMPT)
    name = given[0]
    if name == "input_ids":
        ids = cast("tuple[int, ...]", fields[name])
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestError(name, token, f"token ids from 0 to {limits.vocab_size - 1}")
    elif tokenizer is None:
        raise RequestError(name, fields[name], "input_ids only: the loaded target came without a tokenizer")
    elif name == "text_input":
        ids = tuple(tokenizer.encode(cast(str, fields[name])))
    else:
        ids = tuple(tokenizer.apply_chat_template(_messages(cast(str, fields[name]))))
    if not ids:
        raise RequestError(name, fields[name], "a prompt of at least one token")
    longest = limits.max_context_len - 1
    if len(ids) > longest:
        allowed = f"at most {longest} tokens (a context of {limits.max_context_len} less one for the answer)"
        raise RequestError(name, f"a prompt of {len(ids)} tokens", allowed)
    return ids


def _messages(text: str) -> list[dict[str, str]]:
    allowed = 'a JSON list of at least one {"role": text, "content": text}'
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("messages", text, f"{allowed} ({error})") from None
    if not isinstance(given, list) or not given:
        raise RequestError("messages", text, allowed)
    messages = []
    for message in given:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise RequestError("messages", message, allowed)
        messages.append({key: _text("messages", message[key]) for key in ("role", "content")})
    return messages


def _sampling_params(
    fields: Mapping[str, object], tokenizer: TextCodec | None, limits: ModelLimits, *, room: int
) -> SamplingParams:
    """Build the sampling parameters; `room` is the number of tokens the context has left for the answer."""
    values = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}
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


def _refuse_log_probs(fields: Mapping[str, object], requested: frozenset[str]) -> None:
    if fields.get("return_log_probs"):
        raise RequestError(
            "return_log_probs", True, "false: this version does not give log probabilities yet"
        )
    if fields.get("logprobs"):
        raise RequestError(
            "logprobs", fields["logprobs"], "0: this version does not give log probabilities yet"
        )
    if requested != _ALL_OUTPUTS and requested & _LOG_PROB_OUTPUTS:
        named = sorted(requested & _LOG_PROB_OUTPUTS)
        raise RequestError(
            "outputs", named, "outputs without log probabilities: this version does not give them yet"
        )


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
