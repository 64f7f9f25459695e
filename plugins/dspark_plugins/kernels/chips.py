"""What NVIDIA's architectures give a program, by compute capability. Plain numbers.

Limits are those of the CUDA C++ Programming Guide's table of technical specifications. Bandwidth and arithmetic are a
named product's data-sheet figures (dense, 16-bit inputs, 32-bit sums) and serve estimates alone.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHIPS", "Chip"]

_KIB = 1024
_RESERVED = 1024  # shared memory that the system keeps of every program


@dataclass(frozen=True, slots=True)
class Chip:
    """One compute capability."""

    sm: int
    product: str  # whose bandwidth and arithmetic these are
    shared_per_program: int  # bytes, the most one program may ask for
    shared_per_sm: int  # bytes
    threads_per_sm: int
    programs_per_sm: int
    num_sms: int
    bytes_per_s: float
    flops_per_s: float
    registers_per_sm: int = 65536

    def programs(self, *, num_threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many programs of this size are resident on one multiprocessor; 0 = it does not fit."""
        if shared_bytes > self.shared_per_program or registers > 255:
            return 0
        per_warp = -(-registers * 32 // 256) * 256  # registers are given out in pieces of 256
        by_registers = self.registers_per_sm // (per_warp * (num_threads // 32))
        by_shared = self.shared_per_sm // (shared_bytes + _RESERVED)
        return min(self.threads_per_sm // num_threads, by_registers, by_shared, self.programs_per_sm)

    def floor_s(self, *, num_bytes: float, flops: float) -> float:
        """Return the least seconds that so much traffic and arithmetic can take (the roofline)."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


CHIPS = {
    chip.sm: chip
    for chip in (
        Chip(80, "A100 80GB", 163 * _KIB, 164 * _KIB, 2048, 32, 108, 2.04e12, 312e12),
        Chip(86, "RTX 3090", 99 * _KIB, 100 * _KIB, 1536, 16, 82, 0.936e12, 71e12),
        Chip(89, "RTX 4090", 99 * _KIB, 100 * _KIB, 1536, 24, 128, 1.008e12, 165e12),
        Chip(90, "H100 SXM", 227 * _KIB, 228 * _KIB, 2048, 32, 132, 3.35e12, 989e12),
        Chip(100, "B200", 227 * _KIB, 228 * _KIB, 2048, 32, 148, 8.0e12, 2250e12),
        Chip(120, "RTX 5090", 99 * _KIB, 100 * _KIB, 1536, 24, 170, 1.792e12, 209e12),
    )
}
