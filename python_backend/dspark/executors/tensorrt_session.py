"""What a graph runs on: the few calls that touch a device. All else about an engine is ordinary code above it.

CudaSession   TensorRT on a GPU (tensorrt_cuda.py)
OnnxSession   the exported file on ONNX Runtime's CPU (onnx_session.py), which proves the code above
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dspark.executors.tensorrt_buffers import BufferPlan

__all__ = ["Call", "KeepingSession", "Session"]


@dataclass(frozen=True, slots=True)
class Call:
    """One run at fixed shapes. Equal calls can share whatever a session prepares for one."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of every tensor in the plan, by name
    outputs: tuple[str, ...]  # those that the host reads afterwards

    def __str__(self) -> str:
        told = ", ".join(
            f"{name} {list(shape)}" for name, shape in self.shapes if not name.startswith("kv_cache")
        )
        return f"a call of {told}"


class Session(Protocol):
    """One graph and its memory. Not for several threads."""

    name: str  # "tensorrt" or "onnxruntime"

    def allocate(self, plan: BufferPlan) -> npt.NDArray[np.uint8]:
        """Allocate all memory, caches zeroed, once; return the host's side [host_bytes].

        Raises:
            CapacityError: there is not that much.
        """

    def prepare(self, call: Call) -> None:
        """Make later runs of equal calls cheap (a CUDA graph, bound tensors); runs the call with whatever is in memory.

        Caches may not be in use yet.
        """

    def run(self, call: Call) -> None:
        """Copy inputs from the host's side, run, copy the outputs asked for back, wait: the one wait of a call.

        Raises:
            EngineError: the device refuses.
        """

    def launch(self, call: Call) -> None:
        """Start what `run` does and do not wait; what both sessions of a pair start runs in that order.

        Its inputs on the host's side must not change before `wait`. Raises as `run`.
        """

    def wait(self, call: Call) -> float:
        """Wait for a call that was started; return the seconds that it took on the device. Raises as `run`."""

    def close(self) -> None:
        """Free everything; the host's side is gone too."""


@runtime_checkable
class KeepingSession(Session, Protocol):
    """A session of a pair: what `PAIRED` names lies where the other engine reads it; of that, `KEPT` is copied to the
    host by `fetch` alone."""

    keeps: bool  # False where it runs alone

    def fetch(self, call: Call, name: str) -> None:
        """Copy a tensor that the last run, which was `call`, left on the device to the host's side, and wait.

        Raises:
            EngineError: the device refuses.
        """
