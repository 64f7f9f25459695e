"""A pass in plain torch and our operations as a `Session`: the torch executor on CUDA, with a CUDA graph for each
prepared call.

Copies from and to the pinned mirror are part of a graph. What a pass computes lies in one memory pool of all graphs:
nothing of it outlives the pass but what was copied to the host, and what the drafter leaves for the target. Runs on
the CPU, too, which proves it; no pass has run on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.errors import CapacityError, EngineError
from dspark.executors.tensorrt_bindings import ITEM_BYTES, PAIRED
from dspark.executors.tensorrt_buffers import Buffer, BufferPlan
from dspark.executors.tensorrt_session import Call

__all__ = ["Capture", "CudaCapture", "DevicePass", "Replay", "TorchPair", "TorchSession"]

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


class TorchPair:
    """Memory on a device of what `PAIRED` names; whichever session comes first has it allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def memory(self, name: str, num_bytes: int) -> Tensor:
        """Return where a tensor lies, the same for both sessions."""
        if name not in self._held:
            self._held[name] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        there = self._held[name].numel()
        assert there == num_bytes, f"{name}: one session asks for {num_bytes} bytes, the other for {there}"
        return self._held[name]


class TorchSession:
    """One model on one device; a `KeepingSession`.

    Arguments:
        model: what runs.
        device: where it lives.
        capture: records calls; None = they run as they are.
        pair: memory that it has with the other model of its pair; None = it runs alone.
    """

    def __init__(
        self,
        model: DevicePass,
        device: torch.device,
        capture: Capture | None,
        pair: TorchPair | None = None,
    ) -> None:
        on_gpu = device.type == "cuda"  # whose cost curve is no other's
        self.name = f"torch on {torch.cuda.get_device_name(device)}" if on_gpu else "torch"
        self._model, self._device, self._capture = model, device, capture
        self._pair, self.keeps = pair, pair is not None
        self._took_s = 0.0
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []  # around a call
        )
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
            for name, buffer in plan.buffers.items():
                self._paired_memory(name, buffer)
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
        with self._told(call):
            self._start(call)
            self._synchronize()

    def launch(self, call: Call) -> None:
        """Put copies and kernels of a call on the current stream, between two events."""
        began_s = time.perf_counter()
        with self._told(call):
            for event in self._events[:1]:
                event.record()
            self._start(call)
            for event in self._events[1:]:
                event.record()
        self._took_s = time.perf_counter() - began_s  # true where nothing runs behind our back

    def wait(self, call: Call) -> float:
        """Wait for the stream; return the seconds of the call."""
        with self._told(call):
            self._synchronize()
            if self._events:
                began, ended = self._events
                return float(began.elapsed_time(ended)) / 1000
        return self._took_s

    def fetch(self, call: Call, name: str) -> None:
        """Copy from the pair's memory to the mirror, and wait."""
        assert self._plan is not None
        buffer, shape = self._plan.buffers[name], dict(call.shapes)[name]
        kept = self._paired_memory(name, buffer)
        assert kept is not None
        with self._told(call):
            _view(self._host, buffer, shape).copy_(_shaped(kept, buffer, shape), non_blocking=True)
            self._synchronize()

    def _start(self, call: Call) -> None:
        captured = self._captured.get(call)
        if captured is None:
            self._enqueue(call)
        else:
            captured.replay()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def _told(self, call: Call) -> Iterator[None]:
        """Run on the device; a failure is told with the call it came at."""
        try:
            with torch.inference_mode(), self._on_device():
                yield
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
            elif buffer.binding.kind == "link":
                kept = self._paired_memory(name, buffer)
                assert kept is not None, f"{name} lies in the memory of a pair"
                given[name] = _shaped(kept, buffer, shape)
        made = self._model.device_pass(given)
        for name, shape in call.shapes:
            buffer = buffers[name]
            if buffer.binding.kind == "output" and (kept := self._paired_memory(name, buffer)) is not None:
                _shaped(kept, buffer, shape).copy_(made[name])
            if name in call.outputs:
                _view(self._host, buffer, shape).copy_(made[name], non_blocking=True)

    def _paired_memory(self, name: str, buffer: Buffer) -> Tensor | None:
        """Return the pair's memory of a tensor, None for one that is this session's own."""
        if self._pair is None or name not in PAIRED or buffer.binding.kind == "input":
            return None
        return self._pair.memory(name, buffer.num_bytes)


def _view(memory: Tensor, buffer: Buffer, shape: tuple[int, ...], start: int = 0) -> Tensor:
    """Return a tensor's place in memory that begins at offset `start`, at a call's shape."""
    return _shaped(memory[buffer.offset - start :], buffer, shape)


def _shaped(memory: Tensor, buffer: Buffer, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that begins where `memory` does, at a call's shape."""
    binding = buffer.binding
    num_bytes = ITEM_BYTES[binding.dtype] * math.prod(shape)
    return memory[:num_bytes].view(_DTYPES[binding.dtype]).view(shape)
