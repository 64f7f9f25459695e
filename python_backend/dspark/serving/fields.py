"""Where the fields of a request come from: tensors, request parameters, `sampling_parameters` JSON.

Each value leaves here in its own type and under its canonical name; what it means is `parse`'s business. Where a
field is given twice the tensor wins, then the request parameter, then the JSON object. Unknown request
parameters are left alone (Triton forwards headers and its own options as such); an unknown key in the JSON
object is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError
from dspark.serving.contract import ALIASES, INPUTS, INPUTS_BY_NAME, InputSpec

__all__ = ["read_fields", "text_of"]

_INT_RANGE: Final = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}
# Further keys that vLLM's clients put into the JSON object, and the only values that are done here.
_NEUTRAL_KEYS: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False, True),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "prompt_logprobs": (),
}


# ---- where fields come from ------------------------------------------------------------------------------


def read_fields(
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
        if value is not None:
            fields.update(_from_key(name, value))
    return fields


def _from_key(name: str, value: object) -> dict[str, object]:
    """Return the fields that one key of the JSON object gives."""
    if name in _NEUTRAL_KEYS:
        allowed = _NEUTRAL_KEYS[name]
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise RequestError(name, value, " or ".join(json.dumps(one) for one in allowed) or "nothing")
        return {}
    if name == "stop_token_ids":
        return {name: _ids(name, value)}
    if name == "guided_decoding":
        return _from_guided_decoding(value)
    spec = INPUTS_BY_NAME.get(name)
    if spec is None or name == "sampling_parameters":
        known = {spec.name for spec in INPUTS if spec.name != "sampling_parameters"}
        keys = ", ".join(sorted({*known, *_NEUTRAL_KEYS, "stop_token_ids", "guided_decoding"}))
        raise RequestError("sampling_parameters", name, f"an object with keys among: {keys}")
    return {name: _from_value(spec, value)}


def _from_guided_decoding(value: object) -> dict[str, object]:
    """Return our two fields for vLLM's object (or its JSON text): one of json, json_object, regex, choice."""
    allowed = 'an object with one of "json", "json_object", "regex" and "choice"'
    given = _json_of(value, opening="{")
    if not isinstance(given, dict):
        raise RequestError("guided_decoding", value, allowed)
    given = {key: one for key, one in given.items() if one is not None}
    if len(given) != 1:
        raise RequestError("guided_decoding", value, allowed)
    kind, guide = next(iter(given.items()))
    match kind:
        case "json":
            text = guide if isinstance(guide, str) else json.dumps(guide)
            return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": text}
        case "json_object" if guide is True:
            return {"guided_decoding_guide_type": "json"}
        case "regex" if isinstance(guide, str):
            return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": guide}
        case "choice" if isinstance(guide, list) and guide:
            regex = "|".join(re.escape(text_of("guided_decoding", one)) for one in guide)
            return {"guided_decoding_guide_type": "regex", "guided_decoding_guide": f"({regex})"}
    raise RequestError("guided_decoding", value, allowed)


# ---- one value -------------------------------------------------------------------------------------------


def _from_tensor(spec: InputSpec, array: npt.NDArray[np.generic]) -> object:
    if array.ndim != 2 or array.shape[0] != 1 or (not spec.many and array.shape[1] != 1):
        raise RequestError(
            spec.name, f"a tensor of shape {list(array.shape)}", f"shape [1, {'n' if spec.many else '1'}]"
        )
    if spec.wire_type == "STRING":
        words = tuple(text_of(spec.name, word) for word in array[0])
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
    if spec.name in ("messages", "tools") and isinstance(value, list):
        return json.dumps(value)
    if spec.name == "guided_decoding_guide" and isinstance(value, dict):
        return json.dumps(value)
    if spec.many:
        return _words(spec.name, value) if spec.wire_type == "STRING" else _ids(spec.name, value)
    if spec.wire_type == "STRING":
        return text_of(spec.name, value)
    if spec.wire_type == "BOOL":
        return _truth(spec.name, value)
    return _real(spec.name, value) if spec.wire_type == "FP32" else _whole(spec.name, value, spec.wire_type)


def text_of(name: str, value: object) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
        if isinstance(value, str):
            value.encode("utf-8")
            return value
    except UnicodeError as error:
        raise RequestError(name, value, f"text in valid UTF-8 ({error.reason})") from None  # type: ignore[attr-defined]
    raise RequestError(name, value, "text")


def _json_of(value: object, *, opening: str) -> object:
    """Return what a text that begins so holds as JSON, or the value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _words(name: str, value: object) -> tuple[str, ...]:
    value = _json_of(value, opening="[")
    if isinstance(value, list):
        return tuple(text_of(name, word) for word in value)
    return (text_of(name, value),)


def _ids(name: str, value: object) -> tuple[int, ...]:
    value = _json_of(value, opening="[")
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
