"""Plugin classes and creators of every operation, for TensorRT's registry.

While an engine is built, a plugin asks the compiler given to `register` for the kernels that its shapes can need, and
stores them in the plan as serialised fields; when the plan is loaded it takes them from there. `enqueue` computes
arguments and starts kernels: it allocates nothing and waits for nothing, so a CUDA graph can capture it.
"""

# mypy: disable-error-code="misc,name-defined"
# (TensorRT's classes have no types.)
# ruff: noqa: ARG002  (methods take what TensorRT gives them)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.driver import DriverLauncher, Launcher
from dspark_plugins.tensorrt.forms import Form, decode_forms, encode_forms, pick
from dspark_plugins.tensorrt.module import load_tensorrt
from dspark_plugins.tensorrt.operation import Buffer, Fill, Operation
from dspark_plugins.tensorrt.operations import OPERATIONS

__all__ = ["NAMESPACE", "VERSION", "Compiler", "Creator", "Plugin", "Tools", "register"]

trt = load_tensorrt()

Compiler = Callable[[Sequence[Variant]], Mapping[str, Form]]  # compiled forms by their variants' keys

NAMESPACE, VERSION = "dspark", "1"
_TABLE, _CUBINS = "kernel_table", "cubins"
_DTYPES = {
    trt.float32: "fp32",
    trt.float16: "fp16",
    trt.bfloat16: "bf16",
    trt.int32: "i32",
    trt.int64: "i64",
}
_KEPT = 32  # failures
_ALIGNMENT = 256  # bytes, of every piece of scratch memory
_POINTER = 16  # bytes; what kernels are compiled for (kernels/signatures.py)
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Tools:
    """What all plugins of one registration share."""

    compiler: Compiler  # gives kernels while building
    launcher: Launcher  # starts them
    failures: list[Exception] = field(default_factory=list)  # TensorRT tells less of an exception than it was


def _telling(method: _F) -> _F:
    """Keep the exceptions that a method raises into TensorRT, the first ones of many."""

    @wraps(method)
    def kept(self: Plugin | Creator, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            if len(self.tools.failures) < _KEPT:
                self.tools.failures.append(error)
            raise

    return kept  # type: ignore[return-value]


class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
    """One node of an engine.

    Arguments:
        operation: what it does.
        kernels: its compiled forms by their variants' keys; none before `configure_plugin`.
    """

    def __init__(self, operation: Operation, kernels: Mapping[str, Form], tools: Tools) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuildV2.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.plugin_name = operation.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self.num_outputs = len(operation.outputs)
        self.operation = operation
        self.kernels = kernels
        self.tools = tools
        self._arrays: list[npt.NDArray[Any]] = []  # what the serialised fields point at
        self._stored: Any = None  # those fields

    # Core

    def get_capability_interface(self, type: Any) -> Plugin:  # noqa: A002  (TensorRT's own name)
        return self

    def clone(self) -> Plugin:
        return Plugin(self.operation, self.kernels, self.tools)

    # Building

    @_telling
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        by_name = {name: kind for kind, name in _DTYPES.items()}
        return [by_name[name] for name in self.operation.output_dtypes([_DTYPES[t] for t in input_types])]

    @_telling
    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any
    ) -> list[Any]:
        sizes = [[_Size(shape[i], builder) for i in range(len(shape))] for shape in inputs]
        return [
            trt.DimsExprs([d.expression if isinstance(d, _Size) else builder.constant(d) for d in shape])
            for shape in self.operation.output_shapes(sizes)
        ]

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        if num_inputs != len(self.operation.inputs):
            return False
        asked = [in_out[i].desc for i in range(pos + 1)]
        if asked[pos].format != trt.TensorFormat.LINEAR or asked[pos].type not in _DTYPES:
            return False
        return self.operation.accepts(pos, [_DTYPES.get(desc.type, "") for desc in asked])

    @_telling
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keep the kernels that these inputs can need, and no others."""
        if len(inputs) != len(self.operation.inputs):
            wanted = ", ".join(port.name for port in self.operation.inputs)
            raise ValueError(f"{self.plugin_name}: inputs must be {wanted}, got {len(inputs)}")
        shapes = [tuple(given.desc.dims) for given in inputs]
        dtypes = [_DTYPES[given.desc.type] for given in inputs]
        chosen = self.operation.variants(shapes, dtypes)
        compiled = self.tools.compiler(chosen)
        self.kernels = {variant.key: pick(compiled, variant) for variant in chosen}
        self._stored = None

    def get_aliased_input(self, output_index: int) -> int:
        return self.operation.aliases.get(output_index, -1)

    @_telling
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        sizes = self.operation.scratch([tuple(given.max) for given in inputs])
        return sum(_aligned(size) for size in sizes)

    def get_valid_tactics(self) -> list[int]:
        return []

    # Running

    def get_fields_to_serialize(self) -> Any:
        """Return what a plan keeps; the same fields each time, as TensorRT may still read those of an earlier call."""
        if self._stored is None:
            self._stored = self._fields()
        return self._stored

    def _fields(self) -> Any:
        table, cubins = encode_forms(self.kernels.values())
        fields: list[tuple[str, npt.NDArray[Any], Any]] = [
            (_TABLE, np.frombuffer(table, np.int8), trt.PluginFieldType.CHAR),
            (_CUBINS, np.frombuffer(cubins, np.int8), trt.PluginFieldType.CHAR),
        ]
        for name, value in self.operation.values.items():
            whole = isinstance(value, int)
            array = np.array([value], np.int32 if whole else np.float32)
            kind = trt.PluginFieldType.INT32 if whole else trt.PluginFieldType.FLOAT32
            fields.append((name, array, kind))
        self._arrays = [array for _, array, _ in fields]  # a field holds an address, not the array
        return trt.PluginFieldCollection([trt.PluginField(*one) for one in fields])

    @_telling
    def attach_to_context(self, context: Any) -> Plugin:
        """Return a plugin for one execution context, its kernels on the device."""
        attached = self.clone()
        for form in self.kernels.values():
            self.tools.launcher.load(form)
        return attached

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        pass

    def set_tactic(self, tactic: int) -> None:
        pass

    @_telling
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        given = [_buffer(desc, address) for desc, address in zip(input_desc, inputs, strict=True)]
        made = [_buffer(desc, address) for desc, address in zip(output_desc, outputs, strict=True)]
        ports = (*self.operation.inputs, *self.operation.outputs)
        for port, buffer in zip(ports, (*given, *made), strict=True):
            if buffer.address % _POINTER:  # the kernel would fail, and a later call tell of it
                told = f"{port.name} must lie at a multiple of {_POINTER} bytes, got {buffer.address:#x}"
                raise ValueError(f"{self.plugin_name}: {told}")
        scratch = []
        for size in self.operation.scratch([buffer.shape for buffer in given]):
            scratch.append(workspace)
            workspace += _aligned(size)
        multiprocessors = self.tools.launcher.num_multiprocessors()
        for step in self.operation.launches(given, made, scratch, multiprocessors):
            if isinstance(step, Fill):
                self.tools.launcher.fill(step.address, step.num_words, stream)
            elif 0 not in step.grid:
                self.tools.launcher.launch(
                    pick(self.kernels, step.variant), step.grid, step.arguments, stream
                )


class Creator(trt.IPluginCreatorV3One):
    """Makes the plugins of one operation.

    Arguments:
        operation: class of the operation.
        tools: what its plugins use.
    """

    def __init__(self, operation: type[Operation], tools: Tools) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.name = operation.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self.field_names = trt.PluginFieldCollection([trt.PluginField(name) for name in operation.attributes])
        self._operation, self.tools = operation, tools

    @_telling
    def create_plugin(self, name: str, fields: Any, phase: Any) -> Plugin:
        """Make a plugin from a node's attributes or a plan's fields.

        Raises:
            ValueError: an attribute is missing or wrong, or the plan's kernels are damaged.
        """
        data = {one.name: one.data for one in fields}
        numbers = {name: data[name][0].item() for name in self._operation.attributes if name in data}
        kernels: Mapping[str, Form] = {}
        if phase == trt.TensorRTPhase.RUNTIME:
            missing = [key for key in (_TABLE, _CUBINS) if key not in data]
            if missing:
                raise ValueError(f"{self.name}: the plan lacks the fields {', '.join(missing)}")
            kernels = decode_forms(_bytes(data[_TABLE]), _bytes(data[_CUBINS]))
        return Plugin(self._operation(numbers), kernels, self.tools)


def register(compiler: Compiler | None = None, launcher: Launcher | None = None) -> list[Creator]:
    """Put the creators of all operations into TensorRT's registry, in the place of earlier ones.

    Arguments:
        compiler: gives the kernels of engines that are built; None where plans are only loaded.
        launcher: None = the CUDA driver.

    Returns:
        The creators; they must live as long as engines are built or loaded. Their `tools.failures` keep exceptions.
    """
    registry = trt.get_plugin_registry()
    tools = Tools(compiler or _no_compiler, launcher or DriverLauncher())
    creators = [Creator(operation, tools) for operation in OPERATIONS.values()]
    for creator in creators:
        earlier = registry.get_creator(creator.name, VERSION, NAMESPACE)
        if earlier is not None:
            registry.deregister_creator(earlier)
        if not registry.register_creator(creator, NAMESPACE):
            raise RuntimeError(f"TensorRT refused the creator of {creator.name}")
    return creators


def _no_compiler(variants: Sequence[Variant]) -> Mapping[str, Form]:
    raise RuntimeError(f"no compiler was registered for {len(variants)} kernels of an engine to build")


class _Size:
    """A dimension that TensorRT computes with."""

    def __init__(self, expression: Any, builder: Any) -> None:
        self.expression, self._builder = expression, builder

    def __add__(self, other: _Size | int) -> _Size:
        return self._of(trt.DimensionOperation.SUM, other)

    def __mul__(self, other: _Size | int) -> _Size:
        return self._of(trt.DimensionOperation.PROD, other)

    def _of(self, operation: Any, other: _Size | int) -> _Size:
        right = other.expression if isinstance(other, _Size) else self._builder.constant(other)
        return _Size(self._builder.operation(operation, self.expression, right), self._builder)


def _buffer(desc: Any, address: int) -> Buffer:
    return Buffer(
        int(address), tuple(desc.dims[:]), _DTYPES[desc.type]
    )  # a slice: far faster than by element


def _bytes(data: Any) -> bytes:
    """Return the bytes of a CHAR field, which comes as an array or as bytes."""
    return bytes(data) if isinstance(data, (bytes, bytearray)) else np.asarray(data).tobytes()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
