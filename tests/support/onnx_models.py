"""Models on ONNX Runtime, and a model of one operation with its reference body."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from dspark.executors.tensorrt_bindings import Binding, numpy_dtype
from dspark_build.export_graph import DOMAIN, Graph, finished_model, plugin_attributes

__all__ = ["cpu_session", "nothing_to_verify", "operation", "run_operation"]

_NAMES = {"float32": "fp32", "float16": "fp16", "int32": "i32", "int64": "i64"}


Outputs = Mapping[str, tuple[Any, tuple[int | str, ...]]]


def cpu_session(model: str | bytes) -> onnxruntime.InferenceSession:
    """Return a session of one thread over a file or a serialised model; more of them would wait for each other."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def nothing_to_verify(
    bindings: Iterable[Binding], *, num_sequences: int, num_rows: int
) -> dict[str, np.ndarray]:
    """Return what a target's graph is told of verification, and of drafted sequences, when there are none."""
    sides = {"R": num_sequences, "R+1": num_sequences + 1, "M": num_rows, "Q": 1, "D": 1}
    late = itertools.dropwhile(lambda b: b.name != "verify_start", bindings)
    told = itertools.takewhile(lambda b: b.kind in ("input", "link"), late)
    fed = {b.name: np.zeros([sides.get(str(side), side) for side in b.shape], numpy_dtype(b)) for b in told}
    # One sequence of padding in place of none, whose shapes ONNX's own evaluator takes for others.
    return {name: array - 1 if name == "kinds" else array for name, array in fed.items()}


def operation(
    function: onnx.FunctionProto, feeds: Mapping[str, np.ndarray], outputs: Outputs, **attributes: Any
) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    """Return a call of the operation.

    Arguments:
        feeds: inputs in order, for their types and ranks.
        outputs: type and shape of each by name.
    """
    g = Graph()
    g.op_of(function.name, *feeds, outputs=[*outputs], domain=DOMAIN, **attributes, **plugin_attributes())
    sides = {name: tuple(f"{name}{axis}" for axis in range(array.ndim)) for name, array in feeds.items()}
    bindings = [Binding(name, _NAMES[str(array.dtype)], sides[name]) for name, array in feeds.items()]  # type: ignore[arg-type]
    bindings += [Binding(name, dtype, shape, "output") for name, (dtype, shape) in outputs.items()]
    model = finished_model(g, "one", bindings, [], [function])
    onnx.checker.check_model(model, full_check=True)
    session = cpu_session(model.SerializeToString())
    return lambda given: session.run([*outputs], {name: given[name] for name in feeds})


def run_operation(
    function: onnx.FunctionProto, feeds: Mapping[str, np.ndarray], outputs: Outputs, **attributes: Any
) -> list[np.ndarray]:
    """Return the outputs of one call."""
    return operation(function, feeds, outputs, **attributes)(feeds)
