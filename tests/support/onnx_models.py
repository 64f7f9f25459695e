"""A model of one operation with its reference body, on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from dspark.executors.tensorrt_bindings import Binding
from dspark_build.export_graph import DOMAIN, Graph, finished_model, plugin_attributes

__all__ = ["run_operation"]

_NAMES = {"float32": "fp32", "float16": "fp16", "int32": "i32", "int64": "i64"}


def run_operation(
    function: onnx.FunctionProto,
    feeds: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[Any, tuple[int | str, ...]]],
    **attributes: Any,
) -> Sequence[np.ndarray]:
    """Return the outputs of one call; `outputs` has type and shape of each by name."""
    g = Graph()
    g.op_of(function.name, *feeds, outputs=[*outputs], domain=DOMAIN, **attributes, **plugin_attributes())
    sides = {name: tuple(f"{name}{axis}" for axis in range(array.ndim)) for name, array in feeds.items()}
    bindings = [Binding(name, _NAMES[str(array.dtype)], sides[name]) for name, array in feeds.items()]  # type: ignore[arg-type]
    bindings += [Binding(name, dtype, shape, "output") for name, (dtype, shape) in outputs.items()]
    model = finished_model(g, "one", bindings, [], [function])
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([*outputs], dict(feeds))  # type: ignore[no-any-return]
