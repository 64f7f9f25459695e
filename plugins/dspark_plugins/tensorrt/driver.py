"""Starts compiled kernels through the CUDA driver: no torch, no allocation, no waiting.

The driver library is looked for at the first call, so that engines can be built where there is none.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol

from dspark_plugins.tensorrt.forms import Form

__all__ = ["DriverLauncher", "Launcher", "runs_on"]

_FIRST_OWN = 90  # from here on the compiler writes code for one capability alone (sm_90a, sm_100a, sm_120a)
_CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
_STATIC_SHARED = 48 * 1024  # bytes that need no permission


def runs_on(sm: int, capability: int) -> bool:
    """Return whether kernels compiled for `sm` run on a device: an equal or, before 9.0, a later one of its family."""
    if sm >= _FIRST_OWN:
        return sm == capability
    return sm // 10 == capability // 10 and sm <= capability


class Launcher(Protocol):
    """What a plugin asks of a device."""

    def num_multiprocessors(self) -> int: ...

    def load(self, form: Form) -> None:
        """Bring a kernel onto the current device. Allocates: never called from a plugin's `enqueue`."""

    def launch(
        self, form: Form, grid: tuple[int, ...], arguments: tuple[int | float, ...], stream: int
    ) -> None: ...

    def fill(self, address: int, num_words: int, stream: int) -> None:
        """Write zeros, `num_words` times 4 bytes."""


class DriverLauncher:
    """A launcher on the current CUDA context. Equal cubins of many nodes are loaded once.

    Arguments:
        driver: the module `cuda.bindings.driver`, None = import it at the first use.
    """

    def __init__(self, driver: Any = None) -> None:
        self._driver = driver
        self._functions: dict[tuple[int, str], Any] = {}  # (context, cubin) -> kernel
        self._libraries: list[Any] = []  # as long as their kernels
        self._multiprocessors: dict[int, int] = {}
        self._lock = threading.Lock()

    def num_multiprocessors(self) -> int:
        """Return those of the current device."""
        device = int(self._call("cuCtxGetDevice"))
        if device not in self._multiprocessors:
            self._multiprocessors[device] = self._attribute("MULTIPROCESSOR_COUNT", device)
        return self._multiprocessors[device]

    def load(self, form: Form) -> None:
        """Load a cubin into the current context.

        Raises:
            RuntimeError: the device is of another architecture, or the driver refuses.
        """
        key = self._context(), form.sha256
        with self._lock:
            if key in self._functions:
                return
            device = self._call("cuCtxGetDevice")
            capability = self._capability(device)
            if not runs_on(form.sm, capability):
                raise RuntimeError(
                    f"the plan's kernels are for compute capability {form.sm / 10:.1f}, this device has "
                    f"{capability / 10:.1f}; build the engine with --sm {capability}"
                )
            library = self._call("cuLibraryLoadData", form.cubin, [], [], 0, [], [], 0)
            kernel = self._call("cuLibraryGetKernel", library, form.symbol.encode())
            if form.shared_bytes > _STATIC_SHARED:
                wanted = self._api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuKernelSetAttribute", wanted, form.shared_bytes, kernel, device)
            self._libraries.append(library)
            # Bound to this context now: the first launch would do it, and must not while a graph is captured.
            self._functions[key] = self._call("cuKernelGetFunction", kernel)

    def launch(
        self, form: Form, grid: tuple[int, ...], arguments: tuple[int | float, ...], stream: int
    ) -> None:
        """Start a loaded kernel."""
        kinds = [_CTYPES.get(kind, ctypes.c_void_p) for _, kind in form.arguments]
        # Two pointers of the compiler's own come last.
        parameters = ((*arguments, 0, 0), (*kinds, ctypes.c_void_p, ctypes.c_void_p))
        x, y, z = (*grid, 1, 1)[:3]
        function = self._functions.get((self._context(), form.sha256))
        if function is None:
            raise RuntimeError(
                f"kernel {form.key} was not loaded in this CUDA context: contexts must be made and run on one device"
            )
        common = (function, x, y, z, form.num_threads, 1, 1)
        if form.cooperative:
            self._call("cuLaunchCooperativeKernel", *common, form.shared_bytes, stream, parameters)
        else:
            self._call("cuLaunchKernel", *common, form.shared_bytes, stream, parameters, 0)

    def fill(self, address: int, num_words: int, stream: int) -> None:
        """Write zeros."""
        self._call("cuMemsetD32Async", address, 0, num_words, stream)

    def capability(self, index: int = 0) -> int | None:
        """Return the compute capability of a GPU of this machine (89 = 8.9), None where there is none."""
        try:
            self._call("cuInit", 0)
            return self._capability(self._call("cuDeviceGet", index))
        except (ImportError, RuntimeError):  # no bindings, no driver library, no device
            return None

    def _capability(self, device: Any) -> int:
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}", device) for part in ("MAJOR", "MINOR"))
        return 10 * major + minor

    def _context(self) -> int:
        return int(self._call("cuCtxGetCurrent"))

    def _attribute(self, name: str, device: Any) -> int:
        wanted = getattr(self._api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", wanted, device))

    def _api(self) -> Any:
        if self._driver is None:
            from cuda.bindings import driver

            self._driver = driver
        return self._driver

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; return what it gives back beside its status."""
        status, *rest = getattr(self._api(), name)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{name}: CUDA error {int(status)} ({status})")
        return rest[0] if rest else None
