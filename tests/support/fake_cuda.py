"""A CUDA runtime and a TensorRT in this process's memory: streams that run late, graphs that replay, plans that are
ONNX files. What runs on them is `CudaSession` itself; only the device is not there.
"""

# ruff: noqa: N802, N815
# (The names are CUDA's and TensorRT's.)

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.onnx_models import cpu_session

__all__ = ["CudaError", "FakeCuda", "FakeTensorRT", "write_fake_plan"]

_MAGIC = b"plan of "
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32}
_TYPES |= {"tensor(int64)": np.int64}


def write_fake_plan(path: Path, graph: Path) -> None:
    """Write a plan that `FakeTensorRT` runs."""
    path.write_bytes(_MAGIC + str(graph).encode())


class CudaError(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700


class FakeCuda:
    """What of cuda.bindings.runtime is called. `log` has every call; `fail` makes calls of a name fail."""

    cudaError_t = CudaError
    cudaDeviceAttr = enum.Enum(
        "cudaDeviceAttr", ["cudaDevAttrComputeCapabilityMajor", "cudaDevAttrComputeCapabilityMinor"]
    )
    cudaMemcpyKind = enum.Enum("cudaMemcpyKind", ["cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"])
    cudaStreamCaptureMode = enum.Enum("cudaStreamCaptureMode", ["cudaStreamCaptureModeThreadLocal"])
    cudaStreamNonBlocking = 1

    def __init__(self, capability: int = 89) -> None:
        self.log: list[str] = []
        self.fail: dict[str, CudaError] = {}
        self.memory: dict[int, Any] = {}
        self.waiting: list[Callable[[], None]] = []  # work of the stream that nobody waited for
        self.captured: list[Callable[[], None]] | None = None
        self._capability = capability

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        method = getattr(self, f"_{name.removeprefix('cuda')}")

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            if name in self.fail:
                return (self.fail[name], None)
            found = method(*arguments)
            return (CudaError.cudaSuccess,) if found is None else (CudaError.cudaSuccess, found)

        return called

    def enqueue(self, work: Callable[[], None]) -> None:
        """Put work on the stream."""
        (self.waiting if self.captured is None else self.captured).append(work)

    def _GetErrorString(self, status: CudaError) -> bytes:
        return f"words for {int(status)}".encode()

    def _GetDeviceCount(self) -> int:
        return 1

    def _SetDevice(self, number: int) -> None:
        assert number == 0

    def _DeviceGetAttribute(self, which: Any, _: int) -> int:
        return self._capability // 10 if "Major" in which.name else self._capability % 10

    def _StreamCreateWithFlags(self, _: int) -> int:
        return 7

    def _EventCreate(self) -> list[float]:
        return [0.0]  # when it was passed

    def _EventRecord(self, event: list[float], stream: int) -> None:
        assert stream == 7

        def passed() -> None:
            event[0] = time.perf_counter()

        self.enqueue(passed)

    def _EventElapsedTime(self, began: list[float], ended: list[float]) -> float:
        assert not self.waiting, "events that nobody waited for"
        return 1000 * (ended[0] - began[0])

    def _EventDestroy(self, event: list[float]) -> None:
        event.clear()

    def _StreamSynchronize(self, _: int) -> None:
        assert self.captured is None, "a wait inside a capture"
        done, self.waiting = self.waiting, []
        for work in done:
            work()

    def _Malloc(self, num_bytes: int) -> int:
        assert self.captured is None, "an allocation inside a capture"
        block = (ctypes.c_uint8 * (num_bytes + 256))()
        ctypes.memset(block, 255, len(block))  # NaN in every float
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return address

    _MallocHost = _Malloc

    def _Free(self, address: int) -> None:
        del self.memory[address]

    _FreeHost = _Free

    def _Memcpy(self, to: int, source: int, num_bytes: int, _: Any) -> None:
        ctypes.memmove(to, source, num_bytes)

    def _MemcpyAsync(self, to: int, source: int, num_bytes: int, _: Any, __: int) -> None:
        self.enqueue(lambda: self._Memcpy(to, source, num_bytes, None))

    def _MemsetAsync(self, at: int, value: int, num_bytes: int, _: int) -> None:
        self.enqueue(lambda: ctypes.memset(at, value, num_bytes) and None)

    def _StreamBeginCapture(self, _: int, __: Any) -> None:
        assert self.captured is None
        self.captured = []

    def _StreamEndCapture(self, _: int) -> list[Callable[[], None]]:
        assert self.captured is not None
        graph, self.captured = self.captured, None
        return graph

    def _GraphInstantiate(self, graph: list[Callable[[], None]], _: int) -> list[Callable[[], None]]:
        return list(graph)

    def _GraphDestroy(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def _GraphExecDestroy(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def _GraphLaunch(self, graph: list[Callable[[], None]], _: int) -> None:
        self.waiting += graph


class FakeTensorRT:
    """What of TensorRT's module is called; engines take any shape in profile 1, and few rows in profile 0."""

    __name__, __version__ = "fake_tensorrt", "1.0"
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=0)

    class ILogger:
        ERROR = 1

    def __init__(self, cuda: FakeCuda, *, most_rows: int = 8, capturable: bool = True) -> None:
        self.cuda, self.most_rows, self.capturable = cuda, most_rows, capturable
        self.contexts: list[_Context] = []

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._engine(data, logger))

    def _engine(self, data: bytes, logger: Any) -> Any:
        if not data.startswith(_MAGIC):
            logger.log(1, "Magic tag does not match")
            return None
        return _Engine(self, data.removeprefix(_MAGIC).decode())


class _Engine:
    num_optimization_profiles = 2
    device_memory_size_v2 = 64

    def __init__(self, trt: FakeTensorRT, graph: str) -> None:
        self.trt, self.session = trt, cpu_session(graph)
        self.inputs = {one.name: one for one in self.session.get_inputs()}
        self.outputs = {one.name: one for one in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.inputs[name].shape)

    def get_tensor_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(_TYPES[self.inputs[name].type])

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[list[int], list[int], list[int]]:
        most = self.trt.most_rows if profile == 0 else 1 << 20
        sides = self.inputs[name].shape
        lowest, highest = (
            [side if isinstance(side, int) else bound for side in sides] for bound in (0, most)
        )
        if name.startswith("kv_cache") or name == "page_table":
            highest = [1 << 20] * len(highest)
        return lowest, highest, highest

    def create_execution_context(self, _: int) -> _Context:
        self.trt.contexts.append(_Context(self))
        return self.trt.contexts[-1]


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self.engine, self.cuda = engine, engine.trt.cuda
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.profile, self.is_captured, self.scratch = -1, False, 0

    def set_device_memory(self, address: int, num_bytes: int) -> None:
        assert address in self.cuda.memory and num_bytes == self.engine.device_memory_size_v2
        self.scratch = address

    def set_optimization_profile_async(self, profile: int, _: int) -> bool:
        self.profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 256 == 0 and name in self.engine.names

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert not self.is_captured, "a captured context must not change shapes"
        lowest, _, highest = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return all(a <= side <= b for a, side, b in zip(lowest, shape, highest, strict=True))

    def is_stream_capturable(self, _: int) -> bool:
        return self.engine.trt.capturable

    def execute_async_v3(self, _: int) -> bool:
        if set(self.addresses) != set(self.engine.names) or not self.scratch:
            return False
        self.is_captured |= self.cuda.captured is not None
        bound = self._bound()
        self.cuda.enqueue(lambda: self.engine.session.run_with_iobinding(bound))
        return True

    def _bound(self) -> Any:
        bound, sizes = self.engine.session.io_binding(), {}
        for name, one in self.engine.inputs.items():
            shape = self.shapes.get(name) or tuple(one.shape)  # a table has one shape
            sizes |= dict(zip(one.shape, shape, strict=True))
            bound.bind_input(name, "cpu", 0, _TYPES[one.type], shape, self.addresses[name])
        for name, one in self.engine.outputs.items():
            shape = tuple(sizes.get(side, side) for side in one.shape)
            bound.bind_output(name, "cpu", 0, _TYPES[one.type], shape, self.addresses[name])
        return bound
