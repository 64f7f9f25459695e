"""Gives plugins the compiled kernels that the engine being built needs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.forms import Form

from dspark_build.kernels import KernelEntry, build_kernels

__all__ = ["KernelCompiler"]


class KernelCompiler:
    """Compiles forms for one architecture as plugins ask for them, each once."""

    def __init__(self, sm: int, *, num_jobs: int) -> None:
        self.sm, self._num_jobs = sm, num_jobs
        self.forms: dict[str, Form] = {}
        self.entries: dict[str, KernelEntry] = {}

    def __call__(self, variants: Sequence[Variant]) -> Mapping[str, Form]:
        """Return forms by their variants' keys."""
        missing = [variant for variant in variants if variant.key not in self.forms]
        if missing:
            self._compile(missing)
        return self.forms

    def _compile(self, variants: Sequence[Variant]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            entries = build_kernels(variants, [self.sm], Path(folder), num_jobs=self._num_jobs, quiet=True)
            for entry in entries:
                self.entries[entry.key] = entry
                self.forms[entry.key] = Form(
                    key=entry.key,
                    sm=entry.sm,
                    symbol=entry.symbol,
                    arguments=tuple((name, kind) for name, kind in entry.arguments),
                    num_threads=entry.num_threads,
                    shared_bytes=entry.shared_bytes,
                    cooperative=entry.cooperative,
                    cubin=(Path(folder) / entry.file).read_bytes(),
                )
