"""Puts ONNX graphs together: nodes, constants, loops, reference functions, weights outside the file.

Knows ONNX and nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from dspark.executors.tensorrt_bindings import Binding, DType
from onnx import TensorProto, helper, numpy_helper

__all__ = [
    "DOMAIN",
    "ELEMENT_TYPES",
    "IR_VERSION",
    "OPSET",
    "Graph",
    "body_function",
    "finished_model",
    "plugin_attributes",
    "value_info",
]

DOMAIN = "dspark"
OPSET = 23
IR_VERSION = 11
ELEMENT_TYPES: dict[DType, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
}


def plugin_attributes() -> dict[str, str]:
    """Return the attributes by which TensorRT finds the plugin of a node."""
    return {"plugin_namespace": DOMAIN, "plugin_version": "1"}


def value_info(binding: Binding, *, name: str | None = None) -> onnx.ValueInfoProto:
    """Return a graph's input or output of a binding."""
    return helper.make_tensor_value_info(
        name or binding.name, ELEMENT_TYPES[binding.dtype], list(binding.shape)
    )


def body_function(
    kind: str, g: Graph, *, inputs: Sequence[str], outputs: Sequence[str], attributes: Sequence[str]
) -> onnx.FunctionProto:
    """Return the reference body of an operation of our domain."""
    return helper.make_function(
        DOMAIN,
        kind,
        list(inputs),
        list(outputs),
        g.nodes,
        [helper.make_opsetid("", OPSET)],
        [*attributes, *plugin_attributes()],
    )


def finished_model(
    g: Graph,
    name: str,
    bindings: Sequence[Binding],
    tensors: Sequence[TensorProto],
    functions: Sequence[onnx.FunctionProto],
) -> onnx.ModelProto:
    """Return the model of a graph whose inputs and outputs are those bindings; weights stay initializers."""
    graph = helper.make_graph(
        g.nodes,
        name,
        [value_info(b) for b in bindings if b.kind in ("input", "cache", "link")],
        [value_info(b) for b in bindings if b.kind == "output"]
        + [value_info(b, name=b.alias) for b in bindings if b.kind == "cache"],
        list(tensors),
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=list(functions),
        ir_version=IR_VERSION,
        producer_name="dspark-build",
    )


class Graph:
    """Collects nodes; methods that compute return the name of a value.

    Arguments:
        parent: the graph around the body of a loop, whose values are seen inside.
    """

    def __init__(self, parent: Graph | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._numbers: Iterator[int] = parent._numbers if parent else count()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def fresh(self, stem: str) -> str:
        """Return a name that nothing has yet."""
        return f"{stem}_{next(self._numbers)}"

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output."""
        output = name or self.fresh(kind.lower())
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def op_of(
        self, kind: str, *inputs: str, outputs: int | Sequence[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs, named or numbered."""
        names = [self.fresh(kind.lower()) for _ in range(outputs)] if isinstance(outputs, int) else [*outputs]
        node = helper.make_node(kind, list(inputs), names, name=names[0], domain=domain, **attributes)
        self.nodes.append(node)
        return names

    def constant(self, array: npt.NDArray[Any]) -> str:
        """Return a small constant, the same value for equal arrays."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """Return [n] int64."""
        return self.constant(np.array(values, np.int64))

    def number(self, value: float, dtype: Any = np.int64) -> str:
        """Return a scalar."""
        return self.constant(np.array(value, dtype))

    def attribute(self, name: str, kind: str) -> str:
        """Return a scalar attribute of the function whose body this is; `kind` is int or float."""
        output = self.fresh(name)
        node = helper.make_node("Constant", [], [output], name=output)
        reference = onnx.AttributeProto()
        reference.name = f"value_{kind}"
        reference.ref_attr_name = name
        reference.type = onnx.AttributeProto.INT if kind == "int" else onnx.AttributeProto.FLOAT
        node.attribute.append(reference)
        self.nodes.append(node)
        return output

    def to(self, x: str, dtype: DType) -> str:
        """Return x in another type."""
        return self.op("Cast", x, to=ELEMENT_TYPES[dtype])

    def take(self, x: str, start: str, end: str, axis: int = 0) -> str:
        """Return x[start:end] along an axis; both ends [1] int64."""
        return self.op("Slice", x, start, end, self.ints(axis))

    def size(self, x: str, axis: int) -> str:
        """Return the length of an axis, [1] int64."""
        return self.op("Shape", x, start=axis, end=axis + 1)

    def loop(
        self, trips: str, carried: Sequence[str], body: Callable[[Graph, str, list[str]], list[str]]
    ) -> list[str]:
        """Run a body a number of times and return what it carries.

        Arguments:
            trips: [] int64.
            carried: values before the first round.
            body: from the inner graph, the round [] int64 and the carried values to the carried values after it.
        """
        inner = Graph(self)
        index, go = inner.fresh("round"), inner.fresh("go")
        entries = [inner.fresh("carried") for _ in carried]
        results = [inner.op("Identity", one) for one in body(inner, index, entries)]
        going = inner.op("Identity", go)
        inputs = [
            helper.make_tensor_value_info(index, TensorProto.INT64, []),
            helper.make_tensor_value_info(go, TensorProto.BOOL, []),
            *(onnx.ValueInfoProto(name=name) for name in entries),
        ]
        outputs = [
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            *(onnx.ValueInfoProto(name=name) for name in results),
        ]
        graph = helper.make_graph(inner.nodes, self.fresh("body"), inputs, outputs)
        always = self.constant(np.array(True))
        return self.op_of("Loop", trips, always, *carried, outputs=len(carried), body=graph)

    def choose(
        self,
        condition: str,
        then: Callable[[Graph], list[str]],
        otherwise: Callable[[Graph], list[str]],
    ) -> list[str]:
        """Run one of two bodies, which see the values of this graph and give back equally many.

        Arguments:
            condition: [] bool.
        """
        bodies = {}
        for name, body in (("then_branch", then), ("else_branch", otherwise)):
            inner = Graph(self)
            results = [inner.op("Identity", one) for one in body(inner)]
            outputs = [onnx.ValueInfoProto(name=one) for one in results]
            bodies[name] = helper.make_graph(inner.nodes, self.fresh("branch"), [], outputs)
        return self.op_of("If", condition, outputs=len(bodies["then_branch"].output), **bodies)

    def any(self, flags: str) -> str:
        """Return whether one of bool flags [n] is set, [] bool."""
        return self.op("Cast", self.op("ReduceMax", self.to(flags, "i32"), keepdims=0), to=TensorProto.BOOL)

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        """Return x over its root mean square along the last axis, times a weight; summed in fp32."""
        return self.op("RMSNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)

    def linear(self, x: str, weight: str, *, bias: str | None = None) -> str:
        """Return x [n, in] times weight [out, in] transposed."""
        return self.op("Gemm", x, weight, *([bias] if bias else []), transB=1)
