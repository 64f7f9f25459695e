"""A pass in plain torch and our operations as a `Session`: the torch executor on CUDA, with a CUDA graph for each
prepared call.

Copies from and to the pinned mirror are part of a graph. What a pass computes lies in one memory pool of all graphs:
nothing of it outlives the pass but what was copied to the host. Runs on the CPU, too, which proves it; no pass has run
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.errors import CapacityError, EngineError
from dspark.executors.tensorrt_bindings import ITEM_BYTES
from dspark.executors.tensorrt_buffers import Buffer, BufferPlan
from dspark.executors.tensorrt_session import Call

__all__ = ["Capture", "CudaCapture", "DevicePass", "Replay", "TorchSession"]

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class DevicePass(Protocol):
    """What a session runs."""

    def device_pass(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the outputs of a model by the names of its bindings; caches among the inputs are written in place.

        Nothing in it waits for the device or leaves it.
        """


class Replay(Protocol):
    """A recorded run."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Replay]  # records what a call puts on the device


class CudaCapture:
    """Records CUDA graphs whose intermediate results share one memory pool; they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Record `run`, which ran before: a kernel that compiles inside a capture would end it."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph


class TorchSession:
    """One model on one device.

    Arguments:
        model: what runs.
        device: where it lives.
        capture: records calls; None = they run as they are.
    """

    def __init__(self, model: DevicePass, device: torch.device, capture: Capture | None) -> None:
        on_gpu = device.type == "cuda"  # whose cost curve is no other's
        self.name = f"torch on {torch.cuda.get_device_name(device)}" if on_gpu else "torch"
        self._model, self._device, self._capture = model, device, capture
        self._plan: BufferPlan | None = None
        self._captured: dict[Call, Replay] = {}
        self._host = self._inputs = self._caches = torch.empty(0, dtype=torch.uint8)

    def allocate(self, plan: BufferPlan) -> npt.NDArray[np.uint8]:
        """Allocate caches, inputs and the pinned mirror; outputs have no memory of their own on the device."""
        outputs = [b.offset for b in plan.buffers.values() if b.binding.kind == "output"]
        kind, pinned = torch.uint8, self._device.type == "cuda"
        try:
            self._inputs = torch.zeros(min(outputs, default=plan.host_bytes), dtype=kind, device=self._device)
            self._caches = torch.zeros(plan.device_bytes - plan.host_bytes, dtype=kind, device=self._device)
            self._host = torch.zeros(plan.host_bytes, dtype=kind, pin_memory=pinned)
        except RuntimeError as error:  # torch's allocators raise this, and subclasses of it
            raise CapacityError(
                f"buffers and caches need {plan.device_bytes} bytes on {self._device}: {error}"
            ) from error
        self._plan = plan
        memory: npt.NDArray[np.uint8] = self._host.numpy()
        return memory

    def prepare(self, call: Call) -> None:
        """Run a call and record it."""
        self.run(call)
        if self._capture is not None:
            with torch.inference_mode(), self._on_device():
                self._captured[call] = self._capture(lambda: self._enqueue(call))

    def run(self, call: Call) -> None:
        """Copy in, run, copy out, wait."""
        captured = self._captured.get(call)
        try:
            with torch.inference_mode(), self._on_device():
                if captured is None:
                    self._enqueue(call)
                else:
                    captured.replay()
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise EngineError(f"torch on {self._device} failed at {call}: {error}") from error

    def close(self) -> None:
        """Let graphs and memory go."""
        self._captured.clear()
        self._plan = None
        self._host = self._inputs = self._caches = torch.empty(0, dtype=torch.uint8)

    def _on_device(self) -> Any:
        """Make the GPU this thread's own; graphs are captured on the current one."""
        return torch.device("cpu") if self._device.type == "cpu" else torch.cuda.device(self._device)

    def _enqueue(self, call: Call) -> None:
        """Put copies and kernels of a call on the current stream; may be captured."""
        assert self._plan is not None, "allocate comes before the first run"
        buffers, given = self._plan.buffers, {}
        for name, shape in call.shapes:
            buffer = buffers[name]
            if buffer.binding.kind == "cache":
                given[name] = _view(self._caches, buffer, shape, self._plan.host_bytes)
            elif buffer.binding.kind == "input":
                given[name] = _view(self._inputs, buffer, shape)
                given[name].copy_(_view(self._host, buffer, shape), non_blocking=True)
        made = self._model.device_pass(given)
        for name, shape in call.shapes:
            if name in call.outputs:
                _view(self._host, buffers[name], shape).copy_(made[name], non_blocking=True)


def _view(memory: Tensor, buffer: Buffer, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """Return a tensor's place in memory that begins at offset `start`, at a call's shape."""
    binding, at = buffer.binding, buffer.offset - start
    num_bytes = ITEM_BYTES[binding.dtype]
    for side in shape:
        num_bytes *= side
    return memory[at : at + num_bytes].view(_DTYPES[binding.dtype]).view(shape)
