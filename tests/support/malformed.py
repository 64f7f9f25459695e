"""Seeded malformed requests over the whole wire contract: wrong values, wrong shapes, wrong bytes, wrong JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from dspark.serving.contract import INPUTS, InputSpec

__all__ = ["damage_message", "malformed_parameters", "malformed_tensors"]

_TEXTS: tuple[bytes, ...] = (
    b"", b"\xff\xfe", b"\xed\xa0\x80", b"{", b"[]", b"null", b"[1, 2", b'{"a": ' * 50, b"[" * 5000, b"\x00", b"x" * 300,
    b'{"temperature": -1}', b'{"max_tokens": "many"}', b'{"seed": 1e400}', b'[{"role": "user"}]', b"(((", b"a{9999999}",
    b'{"type": "nonsense"}', b'{"guided_decoding": {"regex": "("}}', "\u202e\U0001f600".encode(), b"NaN", b"-0",
)  # fmt: skip
_WHOLE = (-(2**31), -1, 0, 1, 2, 7, 255, 256, 4095, 2**31 - 1)
_REAL = (-1.0, 0.0, 1e-30, 0.5, 1.0, 1.5, 1e30, float("inf"), float("-inf"), float("nan"))
_JSON: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**80,
    "x",
    "",
    [],
    [None],
    {},
    {"a": 1},
    [[1]],
    "\x00",
    "1e9",
)


def malformed_tensors(rng: random.Random) -> dict[str, np.ndarray]:
    """Return the tensors of one request: a prompt perhaps, and one to four fields of which most are wrong."""
    tensors: dict[str, np.ndarray] = {}
    if rng.random() < 0.8:
        tensors["text_input"] = np.array([[b"hello"]], dtype=np.object_)
    for spec in rng.sample(INPUTS, rng.randint(1, 4)):
        tensors[spec.name] = _array(rng, spec)
    if rng.random() < 0.3:
        keys = rng.sample(
            [*(spec.name for spec in INPUTS), "n", "colour", "stop_token_ids"], rng.randint(1, 3)
        )
        given = {key: rng.choice(_JSON) for key in keys}
        tensors["sampling_parameters"] = np.array([[json.dumps(given).encode()]], dtype=np.object_)
    return tensors


def malformed_parameters(rng: random.Random) -> dict[str, bool | int | str]:
    """Return request parameters, most of them wrong."""
    names = [*(spec.name for spec in INPUTS), "colour", "priority", "timeout"]
    values = (True, False, -1, 0, 3, 2**31, "", "x", "-1", "1e400", "{", "[1", "\u202e", "\x00")
    return {rng.choice(names): rng.choice(values) for _ in range(rng.choice((0, 0, 1, 2)))}


def damage_message(rng: random.Random, message: Any) -> None:
    """Break a ModelInferRequest below the level of values: types, shapes, lengths, names, numbers of tensors."""
    index = rng.randrange(len(message.inputs)) if message.inputs else None
    kind = rng.randrange(8)
    if index is None or kind == 0:
        message.inputs.add(name="colour", datatype="BYTES", shape=[1, 1])
    elif kind == 1:
        message.inputs[index].datatype = rng.choice(("FP16", "INT64", "BYTES", "BOOL", "", "COLOUR"))
    elif kind == 2:
        message.inputs[index].shape[:] = rng.choice(
            ([], [1], [1, 1, 1], [2, 1], [1, 0], [1, 1 << 40], [-1, 1])
        )
    elif kind == 3:
        raw = message.raw_input_contents[index]
        message.raw_input_contents[index] = rng.choice(
            (b"", raw[:-1], raw + b"\x00", raw * 2, rng.randbytes(9))
        )
    elif kind == 4:
        message.raw_input_contents[index] = b"\xff\xff\xff\x7fabc"  # a length that is not there
    elif kind == 5:
        message.inputs.append(message.inputs[index])  # twice, the contents once
    elif kind == 6:
        message.outputs.add(name=rng.choice(("colour", "", "text_output")))
    else:
        message.model_version = rng.choice(("7", "x", "-1"))


def _array(rng: random.Random, spec: InputSpec) -> np.ndarray:
    count = rng.choice((0, 1, 1, 2, 5)) if spec.many else 1
    match spec.wire_type:
        case "STRING":
            values: list[Any] = [rng.choice(_TEXTS) for _ in range(count)]
            array = np.empty((1, count), dtype=np.object_)
            array[0, :] = values
            return array
        case "BOOL":
            return np.array([[rng.random() < 0.5 for _ in range(count)]], dtype=np.bool_)
        case "FP32":
            return np.array([[rng.choice(_REAL) for _ in range(count)]], dtype=np.float32)
        case "UINT64":
            return np.array([[rng.choice((0, 1, 2**63, 2**64 - 1)) for _ in range(count)]], dtype=np.uint64)
        case _:
            return np.array([[rng.choice(_WHOLE) for _ in range(count)]], dtype=np.int32)
