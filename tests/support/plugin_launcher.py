"""Drives TensorRT's plugins without a GPU: their launches run under the Triton language's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.signatures import MODULES, arguments_of
from dspark_plugins.tensorrt.forms import Form
from torch import Tensor

__all__ = ["InterpreterLauncher", "describe", "dynamic", "plan_of", "run_plugin", "uncompiled"]

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class InterpreterLauncher:
    """A launcher whose device memory is that of known tensors."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}
        self.memory: list[Tensor] = []
        self.loaded: list[str] = []
        self.launched: list[str] = []

    def num_multiprocessors(self) -> int:
        return 1

    def compile(self, variants: Sequence[Variant]) -> dict[str, Form]:
        """Stand in for the compiler: the interpreter needs names alone."""
        self.variants |= {variant.key: variant for variant in variants}
        return uncompiled(variants)

    def load(self, form: Form) -> None:
        self.loaded.append(form.key)

    def launch(
        self, form: Form, grid: tuple[int, ...], arguments: tuple[int | float, ...], stream: int
    ) -> None:
        assert form.key in self.loaded and stream == 7
        variant = self.variants[form.key]
        kernel = getattr(
            importlib.import_module(f"dspark_plugins.kernels.{MODULES[variant.kernel]}"), variant.kernel
        )
        values = [
            self._at(int(value), TORCH[kind[1:]]) if kind.startswith("*") else value
            for (_, kind), value in zip(form.arguments, arguments, strict=True)
        ]
        self.launched.append(variant.kernel)
        kernel[grid](*values, **variant.constants)

    def fill(self, address: int, num_words: int, stream: int) -> None:  # noqa: ARG002
        self._at(address, torch.int32)[:num_words] = 0

    def _at(self, address: int, dtype: torch.dtype) -> Tensor:
        """Return the memory from an address to the end of the tensor that holds it."""
        for tensor in self.memory:
            offset = address - tensor.data_ptr()
            if 0 <= offset < max(tensor.nbytes, 1):
                flat = torch.empty(0, dtype=torch.uint8)
                flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes - offset,))
                return flat.view(dtype)
        raise AssertionError(f"address {address} is in no tensor")


def uncompiled(variants: Sequence[Variant]) -> dict[str, Form]:
    """Return forms that nothing can run."""
    return {
        variant.key: Form(
            key=variant.key,
            sm=86,
            symbol=variant.kernel,
            arguments=arguments_of(variant),
            num_threads=32 * variant.num_warps,
            shared_bytes=0,
            cooperative=variant.cooperative,
            cubin=variant.key.encode(),
        )
        for variant in variants
    }


def describe(trt: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return TensorRT's description of a tensor."""
    desc = trt.PluginTensorDesc()
    desc.dims, desc.format = trt.Dims(list(shape)), trt.TensorFormat.LINEAR
    desc.type = getattr(trt, str(dtype).removeprefix("torch."))
    return desc


def dynamic(
    trt: Any, shape: Sequence[int], dtype: torch.dtype, *, unknown: Sequence[int], most: Sequence[int]
) -> Any:
    """Return a description while building, with unknown dimensions and its largest shape."""
    found = trt.DynamicPluginTensorDesc()
    built = [-1 if i in unknown else size for i, size in enumerate(shape)]
    found.desc = describe(trt, built, dtype)
    found.min, found.opt, found.max = trt.Dims(list(shape)), trt.Dims(list(shape)), trt.Dims(list(most))
    return found


def plan_of(
    name: str, attributes: Mapping[str, int | float], inputs: Sequence[Any], launcher: InterpreterLauncher
) -> tuple[Any, Any, list[Any]]:
    """Build one plugin for described inputs.

    Returns:
        the plugin; the fields that a plan would hold; the creators, which must be kept.
    """
    from dspark_plugins.tensorrt import plugin

    trt = plugin.trt
    creators = plugin.register(launcher.compile, launcher)
    creator = trt.get_plugin_registry().get_creator(name, plugin.VERSION, plugin.NAMESPACE)
    kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    arrays = {key: np.array([value], kinds[type(value)][0]) for key, value in attributes.items()}
    fields = [trt.PluginField(key, arrays[key], kinds[type(attributes[key])][1]) for key in arrays]
    built = creator.create_plugin("node", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    built.configure_plugin(inputs, [])
    return built, built.get_fields_to_serialize(), creators


def run_plugin(
    name: str,
    attributes: Mapping[str, int | float],
    inputs: Sequence[Tensor],
    *,
    unknown: Mapping[int, Sequence[int]],
    extra: int = 3,
) -> tuple[list[Tensor], InterpreterLauncher]:
    """Build a plugin, load it from its fields, run it, and return what it wrote.

    Arguments:
        unknown: the dimensions of inputs that are not known while building.
        extra: how much larger those may become, which decides the scratch memory.
    """
    from dspark_plugins.tensorrt import plugin

    trt, launcher = plugin.trt, InterpreterLauncher()
    described = []
    for i, given in enumerate(inputs):
        free = unknown.get(i, ())
        most = [size + extra if axis in free else size for axis, size in enumerate(given.shape)]
        described.append(dynamic(trt, given.shape, given.dtype, unknown=free, most=most))
    built, fields, creators = plan_of(name, attributes, described, launcher)
    scratch_bytes = built.get_workspace_size(described, [])

    creator = next(creator for creator in creators if creator.name == name)
    loaded = creator.create_plugin("node", fields, trt.TensorRTPhase.RUNTIME)
    attached = loaded.attach_to_context(None)
    ports = [str(t.dtype).removeprefix("torch.") for t in inputs]
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}
    dtypes = attached.operation.output_dtypes([short[port] for port in ports])
    shapes = attached.operation.output_shapes([list(t.shape) for t in inputs])
    made = [torch.full(shape, -9, dtype=TORCH[d]) for shape, d in zip(shapes, dtypes, strict=True)]
    for output, source in attached.operation.aliases.items():
        made[output] = inputs[source]
    scratch = torch.full((scratch_bytes,), 0xA5, dtype=torch.uint8)
    launcher.memory = [*inputs, *made, scratch]
    attached.enqueue(
        [describe(trt, t.shape, t.dtype) for t in inputs],
        [describe(trt, t.shape, t.dtype) for t in made],
        [t.data_ptr() for t in inputs],
        [t.data_ptr() for t in made],
        scratch.data_ptr(),
        7,
    )
    return made, launcher
