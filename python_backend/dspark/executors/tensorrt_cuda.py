"""TensorRT on a GPU as a `Session`: the calls of TensorRT and of the CUDA runtime, and nothing else.

Copies go through one pinned mirror at fixed addresses, so that copies and kernels of a call are one CUDA graph. A
context that was captured must not change shapes (NVIDIA/TensorRT issue 3798), so every shape has one of its own; all
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
from dspark.executors.pair_memory import PairMemory
from dspark.executors.tensorrt_bindings import ITEM_BYTES, PAIRED
from dspark.executors.tensorrt_buffers import Buffer, BufferPlan
from dspark.executors.tensorrt_device import INSTALL, CudaDevice, SharedTables
from dspark.executors.tensorrt_session import Call

__all__ = ["CudaSession"]

_KEPT_ERRORS = 8  # of TensorRT's own words


class CudaSession:
    """One plan on one GPU: a context for each optimisation profile, and one for each shape of prepared calls.

    Arguments:
        path: target.plan or drafter.plan.
        device: the GPU.
        tables: weights that the plan takes as inputs; must live as long.
        pair: memory that the plan has with the other one of its pair; must live as long.
        built_with: TensorRT's name and version when the plan was built, for what is told when it does not load.

    Raises:
        ConfigError: TensorRT is missing.
        CheckpointError: a plan that cannot be read here, or has other tensors than this version's.
    """

    name = "tensorrt"

    keeps = True

    def __init__(
        self, path: Path, *, device: CudaDevice, tables: SharedTables, pair: PairMemory, built_with: str
    ) -> None:
        self._device, self._cuda, self._tables, self._pair = device, device.runtime, tables, pair
        self._plan_name = path.name
        device.use()
        self._trt, self._plugins = _tensorrt()
        self._logger = _logger(self._trt)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._load(path, built_with)
        self._stream = device.stream()  # of both plans of a pair: what they start runs in that order
        self._began, self._ended = (self._call("cudaEventCreate", what="an event") for _ in range(2))
        self._contexts: list[Any] = []  # by profile
        self._captured: dict[Call, Any] = {}  # graphs
        self._shaped: dict[tuple[Any, ...], Any] = {}  # their contexts, by shapes; must live as long
        self._plan: BufferPlan | None = None
        self._base = self._host_base = self._scratch = 0

    # Loading

    def _load(self, path: Path, built_with: str) -> Any:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; build the engine again") from error
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            here = f"{self._trt.__name__} {self._trt.__version__}"
            raise CheckpointError(
                f"{path}: built with {built_with}, {here} cannot load it on {self._device}: {self._told()}; "
                "build the engine again"
            )
        return engine

    def _context(self, profile: int) -> Any:
        """Return a new context with every tensor bound to its place."""
        assert self._plan is not None
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise CapacityError(
                f"{self._plan_name}: TensorRT has no room for an execution context on {self._device}: {self._told()}"
            )
        if self._scratch:
            context.set_device_memory(self._scratch, self._engine.device_memory_size_v2)
        chosen = context.set_optimization_profile_async(profile, int(self._stream))
        self._must(chosen, f"optimisation profile {profile}")
        for name, buffer in self._plan.buffers.items():
            names = [name, buffer.binding.alias] if buffer.binding.kind == "cache" else [name]
            for one in names:
                self._bind(context, one, self._address(buffer))
        for name, address in self._tables.addresses.items():
            if name in self._tensors():
                self._bind(context, name, address)
        return context

    def _bind(self, context: Any, name: str, address: int) -> None:
        self._must(context.set_tensor_address(name, address), f"the address of {name}")

    # The session

    def allocate(self, plan: BufferPlan) -> npt.NDArray[np.uint8]:
        """Allocate device memory, its pinned mirror, and bind every tensor to its place."""
        self._device.use()
        self._check_tensors(plan)
        device_bytes, host_bytes = plan.device_bytes, plan.host_bytes
        what = "inputs, outputs and caches"
        self._base = int(self._call("cudaMalloc", device_bytes, what=what, memory=device_bytes))
        self._call("cudaMemsetAsync", self._base, 0, device_bytes, self._stream, what=what)
        what = "the pinned mirror of inputs and outputs"
        self._host_base = int(self._call("cudaMallocHost", host_bytes, what=what, memory=host_bytes))
        scratch = self._engine.device_memory_size_v2
        if scratch:
            what = "scratch memory"
            self._scratch = int(self._call("cudaMalloc", scratch, what=what, memory=scratch))
        self._plan = plan
        self._contexts = [self._context(index) for index in range(self._engine.num_optimization_profiles)]
        self._wait("the start")
        memory = (ctypes.c_uint8 * host_bytes).from_address(self._host_base)
        return np.ctypeslib.as_array(memory)

    def prepare(self, call: Call) -> None:
        """Capture a call in a CUDA graph; where this engine cannot be captured, calls stay as they are."""
        self._device.use()
        context = self._shaped.get(call.shapes)
        if context is None:  # calls that differ in what is read afterwards share one
            context = self._shaped[call.shapes] = self._context(self._profile_of(call))
            self._shape(context, call)
        self._enqueue(context, call)  # TensorRT may allocate and choose at the first run; a capture must not
        self._wait(f"a first run of {call}")
        capturable = getattr(context, "is_stream_capturable", None)  # TensorRT for RTX tells
        if capturable is not None and not capturable(int(self._stream)):
            return
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        what = f"the graph of {call}"
        self._call("cudaStreamBeginCapture", self._stream, mode, what=what)
        try:
            self._enqueue(context, call)
        except EngineError:
            self._cuda.cudaStreamEndCapture(
                self._stream
            )  # it must end too; the first failure is the one to tell
            raise
        graph = self._call("cudaStreamEndCapture", self._stream, what=what)
        self._captured[call] = self._call("cudaGraphInstantiate", graph, 0, what=what)
        self._call("cudaGraphDestroy", graph, what=what)

    def run(self, call: Call) -> None:
        """Copy in, run, copy out, wait."""
        self._device.use()
        self._start(call)
        self._wait(call)

    def launch(self, call: Call) -> None:
        """Put copies and kernels of a call on the stream, between two events."""
        self._device.use()
        self._call("cudaEventRecord", self._began, self._stream, what=call)
        self._start(call)
        self._call("cudaEventRecord", self._ended, self._stream, what=call)

    def wait(self, call: Call) -> float:
        """Wait for the stream; return the seconds between the events."""
        self._device.use()
        self._wait(call)
        took_ms = self._call("cudaEventElapsedTime", self._began, self._ended, what=call)
        return float(took_ms) / 1000

    def _start(self, call: Call) -> None:
        if call in self._captured:
            self._call("cudaGraphLaunch", self._captured[call], self._stream, what=call)
        else:
            context = self._contexts[self._profile_of(call)]
            self._shape(context, call)
            self._enqueue(context, call)

    def fetch(self, call: Call, name: str) -> None:
        """Copy a tensor that the last run left on the device to the pinned mirror, and wait."""
        self._device.use()
        self._copy(name, dict(call.shapes)[name], self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        self._wait(f"{name} of {call}")

    def close(self) -> None:
        """Free graphs, memory and events; the stream is the device's."""
        self._device.use()
        for call, graph in self._captured.items():
            self._call("cudaGraphExecDestroy", graph, what=f"the graph of {call}")
        self._captured.clear()
        self._contexts.clear()
        self._shaped.clear()
        self._engine = self._runtime = None
        for address, free in (
            (self._scratch, "cudaFree"),
            (self._base, "cudaFree"),
            (self._host_base, "cudaFreeHost"),
        ):
            if address:
                self._call(free, address, what="buffers")
        self._base = self._host_base = self._scratch = 0
        for event in (self._began, self._ended):
            self._call("cudaEventDestroy", event, what="events")

    # Parts

    def _shape(self, context: Any, call: Call) -> None:
        for name, shape in call.shapes:
            if self._buffer(name).binding.kind != "output" and not context.set_input_shape(name, shape):
                self._must(False, f"shape {list(shape)} of {name}")

    def _enqueue(self, context: Any, call: Call) -> None:
        """Put copies and kernels of a call on the stream; may be captured."""
        kinds = self._cuda.cudaMemcpyKind
        for name, shape in call.shapes:
            if self._buffer(name).binding.kind == "input":
                self._copy(name, shape, kinds.cudaMemcpyHostToDevice)
        self._must(context.execute_async_v3(int(self._stream)), call)
        for name, shape in call.shapes:
            if name in call.outputs:
                self._copy(name, shape, kinds.cudaMemcpyDeviceToHost)

    def _copy(self, name: str, shape: tuple[int, ...], kind: Any) -> None:
        buffer = self._buffer(name)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[buffer.binding.dtype]
        device, host = self._address(buffer), self._host_base + buffer.offset
        to_device = kind == self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        if num_bytes:
            pair = (device, host) if to_device else (host, device)
            self._call("cudaMemcpyAsync", *pair, num_bytes, kind, self._stream, what=name)

    def _buffer(self, name: str) -> Buffer:
        assert self._plan is not None, "allocate comes before the first run"
        return self._plan.buffers[name]

    def _address(self, buffer: Buffer) -> int:
        """Return where a tensor lies on the device."""
        name = buffer.binding.name
        paired = name in PAIRED
        return self._pair.address(name, buffer.num_bytes) if paired else self._base + buffer.offset

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
        raise EngineError(f"{self._plan_name}: no optimisation profile takes {told}")

    def _admits(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        lowest, _, highest = self._engine.get_tensor_profile_shape(name, profile)
        return all(a <= side <= b for a, side, b in zip(lowest, shape, highest, strict=True))

    def _tensors(self) -> set[str]:
        return {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}

    def _check_tensors(self, plan: BufferPlan) -> None:
        """Refuse an engine whose tensors are not those of the plan and the tables.

        Raises:
            CheckpointError: names them.
        """
        caches = {b.binding.alias for b in plan.buffers.values() if b.binding.kind == "cache"}
        wanted, found = set(plan.buffers) | caches, self._tensors()
        left = found - wanted - set(self._tables.addresses)
        if not wanted <= found or left:
            raise CheckpointError(
                f"{self._plan_name}: its tensors are not those of this version: missing {sorted(wanted - found)}, "
                f"left over {sorted(left)}; build the engine again"
            )
        for name in found & set(self._tables.addresses):
            self._check_table(name)

    def _check_table(self, name: str) -> None:
        sides = [int(side) for side in self._engine.get_tensor_shape(name)]
        needed = int(np.prod(sides)) * self._trt_item_bytes(name)
        given = self._tables.num_bytes[name]
        if given != needed:
            raise CheckpointError(
                f"{self._plan_name}: table {name} {sides} must have {needed} bytes, got {given}; build the engine again"
            )

    def _trt_item_bytes(self, name: str) -> int:
        return int(self._engine.get_tensor_dtype(name).itemsize)

    # Calls that tell when they fail

    def _must(self, done: bool, what: object) -> None:
        if not done:
            raise EngineError(f"{self._plan_name}: TensorRT refuses {what}: {self._told()}")

    def _told(self) -> str:
        """Return TensorRT's last errors, which come without exceptions, and those of our plugins."""
        failures = [f"{type(error).__name__}: {error}" for error in self._plugins[0].tools.failures]
        return "; ".join([*failures, *self._logger.errors][-_KEPT_ERRORS:]) or "it gives no reason"

    def _wait(self, what: object) -> None:
        self._call("cudaStreamSynchronize", self._stream, what=what)

    def _call(self, function: str, *arguments: Any, what: object, memory: int = 0) -> Any:
        return self._device.call(function, *arguments, what=what, of=self._plan_name, memory=memory)


def _logger(trt: Any) -> Any:
    """Return a logger that keeps TensorRT's errors."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors = [*self.errors[1 - _KEPT_ERRORS :], message]

    return Log()


def _tensorrt() -> tuple[Any, Any]:
    """Return TensorRT's module and our registered plugin creators, which must live as long as an engine.

    Raises:
        ConfigError: TensorRT is not installed.
    """
    try:
        trt = importlib.import_module("dspark_plugins.tensorrt.module").load_tensorrt()
        creators = importlib.import_module("dspark_plugins.tensorrt.plugin").register()
    except ImportError as error:
        raise ConfigError(f"executor: tensorrt needs TensorRT ({error}): {INSTALL}") from error
    return trt, creators
