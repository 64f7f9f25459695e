"""TensorRT on a GPU as a `Session`: the calls of TensorRT and of the CUDA runtime, and nothing else.

Copies go through one pinned mirror at fixed addresses, so that copies and kernels of a call are one CUDA graph. A
context that was captured must not change shapes (NVIDIA/TensorRT issue 3798), so every graph has one of its own; all
work in the same scratch memory, one call at a time. Written after the documentation of TensorRT 10 and later and of
cuda-bindings 13; it has never run on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.tensorrt_bindings import ITEM_BYTES
from dspark.executors.tensorrt_buffers import BufferPlan
from dspark.executors.tensorrt_session import Call

__all__ = ["CudaSession"]

_INSTALL = "pip install cuda-bindings, and NVIDIA's tensorrt or tensorrt-rtx"


class CudaSession:
    """One plan on one GPU: a context for each optimisation profile, and one for each prepared call.

    Arguments:
        path: target.plan or drafter.plan.
        device: CUDA's number of the GPU.

    Raises:
        ConfigError: TensorRT, cuda-bindings or a GPU is missing; says which.
        CheckpointError: a plan that cannot be read here: cut short, of another version or for another GPU.
    """

    name = "tensorrt"

    def __init__(self, path: Path, *, device: int = 0) -> None:
        self._cuda, self._device = _cuda_runtime(device), device
        self._set_device()
        self._trt, self._plugins = _tensorrt()
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._load(path)
        self._stream = self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
        self._contexts: list[Any] = []  # by profile
        self._captured: dict[Call, tuple[Any, Any]] = {}  # graph, and the context that must live as long
        self._plan: BufferPlan | None = None
        self._base = self._host_base = self._scratch = 0

    # Loading

    def _load(self, path: Path) -> Any:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise CheckpointError(
                f"{path}: TensorRT {self._trt.__version__} cannot load it on this GPU (cut short, or made by another "
                "version or for another architecture); build it again with `dspark-build engine`"
            )
        return engine

    def _context(self, profile: int) -> Any:
        """Return a new context with every tensor bound to its place."""
        assert self._plan is not None
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise CapacityError("TensorRT has no room for an execution context on this GPU")
        if self._scratch:
            context.set_device_memory(self._scratch, self._engine.device_memory_size_v2)
        chosen = context.set_optimization_profile_async(profile, int(self._stream))
        self._must(chosen, f"optimisation profile {profile}")
        for name, buffer in self._plan.buffers.items():
            names = [name, buffer.binding.alias] if buffer.binding.kind == "cache" else [name]
            for one in names:
                bound = context.set_tensor_address(one, self._base + buffer.offset)
                self._must(bound, f"the address of {one}")
        return context

    # The session

    def allocate(self, plan: BufferPlan) -> npt.NDArray[np.uint8]:
        """Allocate device memory, its pinned mirror, and bind every tensor to its place."""
        self._set_device()
        self._check_tensors(plan)
        self._base = int(self._call("cudaMalloc", plan.device_bytes, memory=plan.device_bytes))
        self._call("cudaMemsetAsync", self._base, 0, plan.device_bytes, self._stream)
        self._host_base = int(self._call("cudaMallocHost", plan.host_bytes, memory=plan.host_bytes))
        scratch = self._engine.device_memory_size_v2
        if scratch:
            self._scratch = int(self._call("cudaMalloc", scratch, memory=scratch))
        self._plan = plan
        self._contexts = [self._context(index) for index in range(self._engine.num_optimization_profiles)]
        self._call("cudaStreamSynchronize", self._stream)
        memory = (ctypes.c_uint8 * plan.host_bytes).from_address(self._host_base)
        return np.ctypeslib.as_array(memory)

    def prepare(self, call: Call) -> None:
        """Capture a call in a CUDA graph; where this engine cannot be captured, calls stay as they are."""
        self._set_device()
        context = self._context(self._profile_of(call))
        self._shape(context, call)
        self._enqueue(context, call)  # TensorRT may allocate and choose at the first run; a capture must not
        self._call("cudaStreamSynchronize", self._stream)
        capturable = getattr(context, "is_stream_capturable", None)  # TensorRT for RTX tells
        if capturable is not None and not capturable(int(self._stream)):
            return
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            self._enqueue(context, call)
        finally:  # a capture that fails must end too
            graph = self._call("cudaStreamEndCapture", self._stream)
        self._captured[call] = self._call("cudaGraphInstantiate", graph, 0), context
        self._call("cudaGraphDestroy", graph)

    def run(self, call: Call) -> None:
        """Copy in, run, copy out, wait."""
        self._set_device()
        if call in self._captured:
            self._call("cudaGraphLaunch", self._captured[call][0], self._stream)
        else:
            context = self._contexts[self._profile_of(call)]
            self._shape(context, call)
            self._enqueue(context, call)
        self._call("cudaStreamSynchronize", self._stream)

    def close(self) -> None:
        """Free graphs, memory and stream."""
        self._set_device()
        for graph, _ in self._captured.values():
            self._call("cudaGraphExecDestroy", graph)
        self._captured.clear()
        self._contexts.clear()
        self._engine = self._runtime = None
        for address, free in (
            (self._scratch, "cudaFree"),
            (self._base, "cudaFree"),
            (self._host_base, "cudaFreeHost"),
        ):
            if address:
                self._call(free, address)
        self._base = self._host_base = self._scratch = 0
        self._call("cudaStreamDestroy", self._stream)

    # Parts

    def _shape(self, context: Any, call: Call) -> None:
        for name, shape in call.shapes:
            if self._buffer(name).binding.kind != "output":
                self._must(context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")

    def _enqueue(self, context: Any, call: Call) -> None:
        """Put copies and kernels of a call on the stream; may be captured."""
        kinds = self._cuda.cudaMemcpyKind
        for name, shape in call.shapes:
            if self._buffer(name).binding.kind == "input":
                self._copy(name, shape, kinds.cudaMemcpyHostToDevice)
        self._must(context.execute_async_v3(int(self._stream)), "to run")
        for name, shape in call.shapes:
            if name in call.outputs:
                self._copy(name, shape, kinds.cudaMemcpyDeviceToHost)

    def _copy(self, name: str, shape: tuple[int, ...], kind: Any) -> None:
        buffer = self._buffer(name)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[buffer.binding.dtype]
        device, host = self._base + buffer.offset, self._host_base + buffer.offset
        to_device = kind == self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        if num_bytes:
            pair = (device, host) if to_device else (host, device)
            self._call("cudaMemcpyAsync", *pair, num_bytes, kind, self._stream)

    def _buffer(self, name: str) -> Any:
        assert self._plan is not None, "allocate comes before the first run"
        return self._plan.buffers[name]

    def _profile_of(self, call: Call) -> int:
        """Return the first optimisation profile that takes the shapes of a call.

        Raises:
            EngineError: none does.
        """
        inputs = [(n, shape) for n, shape in call.shapes if self._buffer(n).binding.kind != "output"]
        for profile in range(self._engine.num_optimization_profiles):
            if all(self._admits(profile, name, shape) for name, shape in inputs):
                return profile
        told = ", ".join(f"{name} {list(shape)}" for name, shape in inputs)
        raise EngineError(f"no optimisation profile of this engine takes {told}")

    def _admits(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        lowest, _, highest = self._engine.get_tensor_profile_shape(name, profile)
        return all(a <= side <= b for a, side, b in zip(lowest, shape, highest, strict=True))

    def _check_tensors(self, plan: BufferPlan) -> None:
        """Refuse an engine whose tensors are not those of the plan.

        Raises:
            CheckpointError: names them.
        """
        wanted = set(plan.buffers) | {
            b.binding.alias for b in plan.buffers.values() if b.binding.kind == "cache"
        }
        found = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        if found != wanted:
            raise CheckpointError(
                f"the plan's tensors are not those of this version: missing {sorted(wanted - found)}, "
                f"left over {sorted(found - wanted)}; build it again with `dspark-build engine`"
            )

    # Calls that tell when they fail

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise EngineError(f"TensorRT refuses {what}")

    def _set_device(self) -> None:
        """Make the GPU this thread's own: the engine's thread is not the one that loaded it."""
        self._call("cudaSetDevice", self._device)

    def _call(self, function: str, *arguments: Any, memory: int = 0) -> Any:
        """Call the CUDA runtime and return what it gives back.

        Raises:
            CapacityError: no room for `memory` bytes.
            EngineError: any other failure.
        """
        return _checked(self._cuda, function, *arguments, memory=memory)


def _checked(cuda: Any, function: str, *arguments: Any, memory: int = 0) -> Any:
    status, *values = getattr(cuda, function)(*arguments)
    if status == cuda.cudaError_t.cudaSuccess:
        return values[0] if values else None
    if memory and status == cuda.cudaError_t.cudaErrorMemoryAllocation:
        raise CapacityError(f"buffers and caches need {memory} bytes, which this GPU or its host has not")
    raise EngineError(f"{function} failed: {status.name}")


def _cuda_runtime(device: int) -> Any:
    """Return the CUDA runtime's bindings where there is such a GPU.

    Raises:
        ConfigError: there is none, or no bindings.
    """
    try:
        cuda: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(f"executor: tensorrt needs cuda-bindings ({error}): {_INSTALL}") from error
    try:
        status, count = cuda.cudaGetDeviceCount()
    except RuntimeError as error:  # the bindings find no runtime library
        raise ConfigError(f"executor: tensorrt needs a CUDA GPU: {error}") from error
    if status != cuda.cudaError_t.cudaSuccess:
        raise ConfigError(f"executor: tensorrt needs a CUDA GPU and its driver: {status.name}")
    if not 0 <= device < count:
        raise ConfigError(f"device: got {device}, allowed are 0 to {count - 1}")
    return cuda


def _tensorrt() -> tuple[Any, Any]:
    """Return TensorRT's module and our registered plugin creators, which must live as long as an engine.

    Raises:
        ConfigError: TensorRT is not installed.
    """
    try:
        trt = importlib.import_module("dspark_plugins.tensorrt.module").load_tensorrt()
        creators = importlib.import_module("dspark_plugins.tensorrt.plugin").register()
    except ImportError as error:
        raise ConfigError(f"executor: tensorrt needs TensorRT ({error}): {_INSTALL}") from error
    return trt, creators
