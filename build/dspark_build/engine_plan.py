"""One ONNX graph to one TensorRT plan, plugins and their kernels inside; no other file here has TensorRT."""

# mypy: disable-error-code="misc,name-defined"
# (TensorRT's classes have no types.)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from dspark.errors import ConfigError, EngineError
from dspark.executors.tensorrt_bindings import Binding
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.tensorrt.driver import DriverLauncher
from dspark_plugins.tensorrt.plugin import NAMESPACE, register, trt

from dspark_build.engine_kernels import KernelCompiler
from dspark_build.engine_profiles import Profile, profile_shapes
from dspark_build.engine_report import Layer, layers_of, missing_plugins

__all__ = ["BuiltPlan", "build_plan", "check_architecture", "known_architectures", "tensorrt_version"]

_ATTENTION = ("ATTENTION", "SOFTMAX", "RAGGED_SOFTMAX")  # layer types that no graph of ours may keep


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """What came out of a build."""

    data: Any  # TensorRT's memory; a buffer of bytes
    layers: tuple[Layer, ...]
    plugin_nodes: tuple[str, ...]


class _Log(trt.ILogger):
    """Keeps TensorRT's messages: layers are only told there, and errors come without exceptions."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.messages: list[str] = []
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)
        else:
            self.messages.append(message)


def tensorrt_version() -> str:
    """Return the module's name and version."""
    return f"{trt.__name__} {trt.__version__}"


def check_architecture(sm: int, precision: str) -> None:
    """Refuse an architecture or precision before anything is built.

    Raises:
        ConfigError: TensorRT does not know it, the chip lacks the precision, or another one is plugged in.
    """
    known = known_architectures()
    if known and sm not in known:
        allowed = ", ".join(str(one) for one in known if one in CHIPS)
        raise ConfigError(
            f"--sm: got {sm}, which {tensorrt_version()} cannot build for; allowed are {allowed}"
        )
    if not known:
        _check_at_hand(sm)
    if precision == "bf16" and sm < 80:
        raise ConfigError(
            f"--precision: got 'bf16', which sm {sm} does not have; allowed with it is --sm 80 or more"
        )


def _check_at_hand(sm: int) -> None:
    """Refuse an architecture that is not the plugged-in GPU's, for a TensorRT that builds for no other."""
    found = DriverLauncher().capability()
    if found is None:
        raise ConfigError(
            f"{tensorrt_version()} builds for the GPU at hand alone, and there is none; tensorrt-rtx builds without"
        )
    if sm != found:
        raise ConfigError(
            f"--sm: got {sm}, but {tensorrt_version()} builds for the GPU at hand alone; allowed is {found}"
        )


def known_architectures() -> list[int]:
    """Return what can be chosen; nothing where TensorRT builds for the GPU at hand alone."""
    if not hasattr(trt, "ComputeCapability"):
        return []
    names = trt.ComputeCapability.__members__
    return sorted(int(name.removeprefix("SM")) for name in names if name.startswith("SM"))


def build_plan(
    path: Path,
    model: onnx.ModelProto,
    bindings: Sequence[Binding],
    profiles: Sequence[Profile],
    compiler: KernelCompiler,
) -> BuiltPlan:
    """Build the plan of a graph.

    Arguments:
        path: where the graph's weights lie beside.
        model: the graph.
        bindings: its tensors.
        compiler: gives kernels for the architecture to build for.

    Raises:
        ConfigError: shapes that TensorRT does not take.
        EngineError: TensorRT cannot parse or build it, or a plugin's node did not become a plugin's layer.
    """
    log = _Log()
    creators = register(compiler)
    failures = creators[0].tools.failures
    builder = trt.Builder(log)
    strongly = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.SerializeToString(), str(path)):
        told = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise EngineError(f"TensorRT cannot read {path}: {_first(failures, log.errors, told)}")
    _check_fused(network)
    config = _config(builder, compiler.sm)
    for profile in profiles:
        wanted = builder.create_optimization_profile()
        for name, shapes in profile_shapes(bindings, profile).items():
            wanted.set_shape(name, *shapes)
        if config.add_optimization_profile(wanted) < 0:
            raise ConfigError(
                f"TensorRT refuses the shapes of {profile.name}: {_first(failures, log.errors)}"
            )
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise EngineError(f"TensorRT cannot build {path.name}: {_first(failures, log.errors)}")
    layers, nodes = layers_of(log.messages), _plugin_nodes(model)
    missing = missing_plugins(layers, nodes, num_profiles=len(profiles))
    if missing:
        raise EngineError(f"{path.name}: {', '.join(missing)} did not become plugins of the engine")
    return BuiltPlan(data=data, layers=tuple(layers), plugin_nodes=tuple(nodes))


def _config(builder: Any, sm: int) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)  # caches in place
    if known_architectures():
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    return config


def _check_fused(network: Any) -> None:
    """Refuse a network in which attention is anything but a plugin.

    Raises:
        EngineError: names the layers; a plugin that was not found leaves its node's reference body behind.
    """
    unfused = {getattr(trt.LayerType, name) for name in _ATTENTION if hasattr(trt.LayerType, name)}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    found = [layer.name for layer in layers if layer.type in unfused]
    if found:
        raise EngineError(f"attention is not a plugin in {', '.join(found[:5])}")


def _plugin_nodes(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.domain == NAMESPACE]


def _first(failures: Sequence[Exception], errors: Sequence[str], otherwise: str = "no reason given") -> str:
    """Return the first thing that went wrong, our own before TensorRT's words for it."""
    if failures:
        return f"{type(failures[0]).__name__}: {failures[0]}"
    # Every look for a GPU fails where there is none.
    told = [error for error in errors if "cudaError 35" not in error and "CUDA driver version" not in error]
    return told[0] if told else otherwise
