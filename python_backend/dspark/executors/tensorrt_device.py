"""One GPU through the CUDA runtime: calls that say what failed and for what, and tables that several plans read.

Written after the documentation of cuda-bindings 13; it has never run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.pair_memory import PairMemory

__all__ = ["INSTALL", "CudaDevice", "SharedTables", "device_pair_memory"]

INSTALL = "pip install cuda-bindings, and NVIDIA's tensorrt or tensorrt-rtx"


class CudaDevice:
    """The CUDA runtime on one GPU.

    Arguments:
        number: CUDA's number of the GPU.

    Raises:
        ConfigError: cuda-bindings, a driver or that GPU is missing; says which.
    """

    def __init__(self, number: int = 0) -> None:
        self.runtime, self.number = _cuda_runtime(number), number
        self._stream: Any = None

    def call(self, function: str, *arguments: Any, what: object, of: str = "", memory: int = 0) -> Any:
        """Call the CUDA runtime and return what it gives back.

        Arguments:
            what: what the call is for, as in "cudaMalloc failed for <what>"; put into words only when it fails.
            of: the plan's name.
            memory: bytes that it asks for.

        Raises:
            CapacityError: no room for `memory` bytes.
            EngineError: any other failure; names call, purpose and CUDA's reason. A kernel that failed is often told
                by a later call.
        """
        status, *values = getattr(self.runtime, function)(*arguments)
        if status == self.runtime.cudaError_t.cudaSuccess:
            return values[0] if values else None
        owner = f" of {of}" if of else ""
        told = f"{function} failed for {what}{owner} on {self}: {self._reason(status)}"
        if memory and status == self.runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise CapacityError(
                f"{told}; it needs {memory} bytes, allowed is what this GPU or its host has free"
            )
        raise EngineError(told)

    def use(self) -> None:
        """Make the GPU this thread's own: the engine's thread is not the one that loaded it."""
        self.call("cudaSetDevice", self.number, what="this thread")

    def stream(self) -> Any:
        """Return the stream of everything that runs here, the same every time; it is the process's until its end."""
        if self._stream is None:
            flag = self.runtime.cudaStreamNonBlocking
            self._stream = self.call("cudaStreamCreateWithFlags", flag, what="a stream")
        return self._stream

    def capability(self) -> int:
        """Return the compute capability, 89 for 8.9."""
        of = self.runtime.cudaDeviceAttr
        parts = (of.cudaDevAttrComputeCapabilityMajor, of.cudaDevAttrComputeCapabilityMinor)
        major, minor = (
            int(self.call("cudaDeviceGetAttribute", part, self.number, what="the compute capability"))
            for part in parts
        )
        return 10 * major + minor

    def __str__(self) -> str:
        return f"GPU {self.number}"

    def _reason(self, status: Any) -> str:
        error, text = self.runtime.cudaGetErrorString(status)
        known = error == self.runtime.cudaError_t.cudaSuccess
        words = text.decode() if known and isinstance(text, bytes) else ""
        return f"{status.name} ({words})" if words else str(status.name)


class SharedTables:
    """Weights that both plans take as an input, once in a GPU's memory; read-only, so any thread may run with them.

    Arguments:
        files: of each input, by its name.

    Raises:
        CheckpointError: a file cannot be read.
        CapacityError: there is no room for them.
    """

    def __init__(self, device: CudaDevice, files: Mapping[str, Path]) -> None:
        self._device = device
        self.addresses: dict[str, int] = {}
        self.num_bytes: dict[str, int] = {}
        device.use()
        try:
            for name, path in files.items():
                self._upload(name, path)
        except BaseException:
            self.close()
            raise

    def _upload(self, name: str, path: Path) -> None:
        try:
            data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read: {error}; build the engine again") from error
        device, size = self._device, data.nbytes
        self.addresses[name] = int(device.call("cudaMalloc", size, what=path.name, memory=size))
        self.num_bytes[name] = size
        kind = device.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        device.call("cudaMemcpy", self.addresses[name], data.ctypes.data, size, kind, what=path.name)

    def close(self) -> None:
        """Free the memory; no plan may run with it any more."""
        self._device.use()
        for name, address in self.addresses.items():
            self._device.call("cudaFree", address, what=f"table {name}")
        self.addresses.clear()


def device_pair_memory(device: CudaDevice) -> PairMemory:
    """Return memory of a GPU that two plans share; it is the process's until its end, as shared tables are."""

    def allocate(name: str, num_bytes: int) -> int:
        device.use()
        what = f"{name}, which both plans have"
        return int(device.call("cudaMalloc", num_bytes, what=what, memory=num_bytes))

    return PairMemory(allocate)


def _cuda_runtime(number: int) -> Any:
    """Return the CUDA runtime's bindings where there is such a GPU.

    Raises:
        ConfigError: there is none, or no bindings.
    """
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(f"executor: tensorrt needs cuda-bindings ({error}): {INSTALL}") from error
    try:
        status, count = runtime.cudaGetDeviceCount()
    except RuntimeError as error:  # the bindings find no runtime library
        raise ConfigError(f"executor: tensorrt needs a CUDA GPU: {error}") from error
    if status != runtime.cudaError_t.cudaSuccess:
        raise ConfigError(f"executor: tensorrt needs a CUDA GPU and its driver: {status.name}")
    if not 0 <= number < count:
        raise ConfigError(f"device: got cuda:{number}, allowed are cuda:0 to cuda:{count - 1}")
    return runtime
