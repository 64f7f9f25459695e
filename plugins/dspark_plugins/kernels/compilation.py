"""Compile one form of a kernel for one architecture, without a GPU."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.signatures import MODULES, arguments_of

__all__ = ["CompiledKernel", "compile_kernel", "tool_versions"]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin and what it takes of a multiprocessor."""

    cubin: bytes
    symbol: str
    shared_bytes: int  # dynamic, per program
    num_threads: int
    registers: int  # per thread
    stack_bytes: int  # per thread; not 0 = arrays or spills in memory
    spill_bytes: int  # per thread, stores and loads


def compile_kernel(variant: Variant, sm: int) -> CompiledKernel:
    """Compile for compute capability `sm` (89 = 8.9).

    Raises:
        RuntimeError: when the interpreter is chosen (TRITON_INTERPRET=1): it takes the place of the compiler.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # debug lines are most of a cubin
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(
        importlib.import_module(f"dspark_plugins.kernels.{MODULES[variant.kernel]}"), variant.kernel
    )
    arguments = arguments_of(variant)
    names = [name for name, _ in arguments]
    if names != kernel.arg_names[: len(names)] or set(kernel.arg_names[len(names) :]) != set(
        variant.constants
    ):
        raise RuntimeError(f"{variant.kernel}: signatures.py does not tell the arguments of the kernel")
    signature = dict(arguments) | dict.fromkeys(variant.constants, "constexpr")
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in arguments
        if kind.startswith("*")
    }
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    if variant.cooperative:
        options["launch_cooperative_grid"] = True
    source = ASTSource(kernel, signature, dict(variant.constants), aligned)
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    cubin = built.asm["cubin"]
    registers, stack = _resources(cubin)
    return CompiledKernel(
        cubin=cubin,
        symbol=str(built.metadata.name),
        shared_bytes=int(built.metadata.shared),
        num_threads=32 * variant.num_warps,
        registers=registers,
        stack_bytes=stack,
        spill_bytes=_spills(cubin) if stack else 0,
    )


def tool_versions() -> dict[str, str]:
    """Return the versions that decide what a cubin looks like."""
    import triton

    return {
        "triton": triton.__version__,
        "ptxas": _run("ptxas", "--version").split("release ")[-1].split(",")[0],
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = _run("cuobjdump", "--dump-resource-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resources: {told}")
    return int(found[1]), int(found[2])


def _spills(cubin: bytes) -> int:
    """Return how many bytes local loads and stores of the machine code move, at most once each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        code = _run("cuobjdump", "--dump-sass", str(path))
    widths = re.findall(r"\b(?:STL|LDL)(?:\.[A-Z]+)*?(?:\.(64|128))?\b", code)
    return sum(int(width or 32) // 8 for width in widths)


def _run(tool: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    done = subprocess.run([path, *arguments], check=True, capture_output=True, text=True)
    return done.stdout
