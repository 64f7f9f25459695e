"""The native CPU pass: C++ kernels compiled on the machine, behind ctypes. No torch.

Importing this package compiles nothing; `native_available` does, once, when the library is not there yet.
"""

from dspark_plugins.native.binding import isa, native_available, native_unavailable_reason

__all__ = ["isa", "native_available", "native_unavailable_reason", "preferred_dtype"]


def preferred_dtype() -> str:
    """Return bfloat16 where the processor multiplies it, else float32."""
    return "bfloat16" if isa() == "avx512" else "float32"
