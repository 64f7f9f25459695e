"""Runs an exported graph on ONNX Runtime's CPU from the buffers of a plan: what proves the runtime without a GPU.

Slow: attention runs as the reference body, sequence after sequence.
"""

from __future__ import annotations

import ctypes
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.pair_memory import PairMemory
from dspark.executors.tensorrt_bindings import ITEM_BYTES, PAIRED, numpy_dtype
from dspark.executors.tensorrt_buffers import Buffer, BufferPlan
from dspark.executors.tensorrt_session import Call

__all__ = ["OnnxSession"]


class OnnxSession:
    """A `Session` in this process's own memory: the host's side is the device's.

    Arguments:
        path: target.onnx or drafter.onnx.
        num_threads: 0 = one per core.
        pair: memory that it has with the other graph of its pair; None = it runs alone.

    Raises:
        ConfigError: onnxruntime is not installed.
        CheckpointError: a file that cannot be read, or a precision that the CPU has not (bf16).
    """

    name = "onnxruntime"

    def __init__(self, path: Path, *, num_threads: int = 0, pair: PairMemory | None = None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(
                "running ONNX files needs onnxruntime: pip install 'dspark-triton[export]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # one class for each of its status codes, none of them documented
            raise CheckpointError(f"{path}: ONNX Runtime cannot run it: {str(error)[:300]}") from error
        self._pair, self.keeps = pair, pair is not None
        self._plan: BufferPlan | None = None
        self._memory = np.empty(0, np.uint8)
        self._prepared: dict[Call, Any] = {}
        self._took_s = 0.0

    def allocate(self, plan: BufferPlan) -> npt.NDArray[np.uint8]:
        """Allocate all memory; return its front part, inputs and outputs."""
        try:
            memory = np.zeros(plan.device_bytes, np.uint8)
        except MemoryError as error:
            raise CapacityError(f"buffers and caches need {plan.device_bytes} bytes: {error}") from error
        self._memory, self._plan = memory, plan
        return memory[: plan.host_bytes]

    def prepare(self, call: Call) -> None:
        """Bind the tensors of a call, and run it once."""
        self._prepared[call] = self._bound(call)
        self.run(call)

    def run(self, call: Call) -> None:
        """Run on the bound memory."""
        bound = self._prepared.get(call) or self._bound(call)
        try:
            self._session.run_with_iobinding(bound)
        except Exception as error:  # as above
            raise EngineError(f"ONNX Runtime: {str(error)[:300]}") from error
        assert self._plan is not None
        for name in call.outputs:
            if self._paired(name) and self._plan.buffers[name].binding.kind == "output":
                self.fetch(call, name)

    def launch(self, call: Call) -> None:
        """Run: on a CPU there is nobody to wait for."""
        started = time.perf_counter()
        self.run(call)
        self._took_s = time.perf_counter() - started

    def wait(self, call: Call) -> float:  # noqa: ARG002
        """Return the seconds of the last run."""
        return self._took_s

    def fetch(self, call: Call, name: str) -> None:
        """Copy from the pair's memory to the front part."""
        assert self._plan is not None
        buffer, shape = self._plan.buffers[name], dict(call.shapes)[name]
        size = math.prod(shape) * ITEM_BYTES[buffer.binding.dtype]
        ctypes.memmove(self._memory.ctypes.data + buffer.offset, self._address(buffer), size)

    def close(self) -> None:
        """Let session and memory go."""
        self._prepared.clear()
        self._session, self._plan = None, None
        self._memory = np.empty(0, np.uint8)

    def _bound(self, call: Call) -> Any:
        """Return tensors bound to their places, a cache as input and as output at once."""
        assert self._plan is not None
        bound = self._session.io_binding()
        for name, shape in call.shapes:
            buffer = self._plan.buffers[name]
            binding = buffer.binding
            where = ("cpu", 0, numpy_dtype(binding), shape, self._address(buffer))
            if binding.kind != "output":
                bound.bind_input(name, *where)
            if binding.kind == "cache":
                bound.bind_output(binding.alias, *where)
            elif name in call.outputs or (binding.kind == "output" and self._paired(name)):
                bound.bind_output(name, *where)
        return bound

    def _paired(self, name: str) -> bool:
        return self._pair is not None and name in PAIRED

    def _address(self, buffer: Buffer) -> int:
        name = buffer.binding.name
        if self._pair is not None and name in PAIRED:
            return self._pair.address(name, buffer.num_bytes)
        assert buffer.offset >= 0, f"{name} lies in the memory of a pair"
        return self._memory.ctypes.data + buffer.offset
