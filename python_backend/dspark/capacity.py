"""The cost curve that an engine starts with: a file beside model.yaml, one measured here before, or one measured now.

What is measured, and how, is in `scheduling.measurement`; a curve that does not fit this machine, executor, type,
thread count and pair is never used. Measured curves are kept in the state folder (`.dspark/capacity/`), one file for
each set-up and batch size: a curve measured for one request at a time knows nothing of sixteen.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dspark.config import NUM_DRAFT_TOKENS, ServeConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.identity import drafter_identity
from dspark.drafters.interface import Drafter
from dspark.engine.admission import EngineLimits
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.scheduling.cost_model import CapacityFile, CostCurve, Fingerprint
from dspark.scheduling.machine import machine_name
from dspark.scheduling.measurement import Bench, measure_curve, pages_needed, rows_of_a_sequence
from dspark.serving.paths import state_dir

__all__ = ["fingerprint_of", "measure_pair", "starting_curve"]

Progress = Callable[[str], None]

_QUICK_S = 5.0  # seconds spent when a server measures by itself
_QUICK_CONTEXT = 256  # cached tokens of its long passes
_LEAST_ROWS = 8  # a curve over fewer rows says nothing


def fingerprint_of(
    target: TargetExecutor,
    *,
    drafter: str,
    drafter_dtype: str = "auto",
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    tree_size: int = 0,
    num_threads: int = 0,
) -> Fingerprint:
    """Return what a curve of this pair holds for.

    Arguments:
        drafter: name or folder.
        drafter_dtype, num_draft_tokens: the settings of these names.
        tree_size: most nodes of its trees, 0 = it was measured drafting chains.
        num_threads: what was asked for, for an executor that does not tell; 0 = its own choice.
    """
    identity = drafter_identity(drafter)
    if num_draft_tokens != NUM_DRAFT_TOKENS:
        identity += f" of {num_draft_tokens}"
    if tree_size:
        identity += f" with trees of {tree_size}"
    return Fingerprint(
        machine=machine_name(),
        executor=target.name,
        dtype=target.dtype,
        num_threads=int(getattr(target, "num_threads", num_threads)),
        target_hash=target.config.model_hash,
        drafter=identity if drafter_dtype == "auto" else f"{identity} in {drafter_dtype}",
    )


def starting_curve(
    config: ServeConfig,
    target: TargetExecutor,
    drafter: Drafter,
    *,
    spec: str,
    limits: EngineLimits,
    base: Path | None,
    progress: Progress,
) -> CostCurve | None:
    """Return the measured curve of this set-up; None = learn it while serving.

    Arguments:
        target, drafter: their caches are allocated and nothing is in them; measuring writes to their pages.
        spec: name or folder of the drafter.
        base: folder of model.yaml.

    Raises:
        ConfigError: the file that was named cannot be used, or is of another set-up.
    """
    if config.capacity == "none":
        return None
    expected = fingerprint_of(
        target,
        drafter=spec,
        drafter_dtype=config.drafter_dtype,
        num_draft_tokens=config.num_draft_tokens,
        tree_size=drafter.tree_size if isinstance(drafter, DSparkDrafter) else 0,
        num_threads=config.num_threads,
    )
    if config.capacity != "auto":
        path = Path(config.capacity).expanduser()
        if base is not None and not path.is_file():
            path = base / path
        named = CapacityFile.load(path)
        named.check_fingerprint(expected)
        return named.curve
    kept = state_dir() / "capacity" / f"{_digest(expected, limits.max_batch_size)}.json"
    for path in (*(() if base is None else (base / "capacity.json",)), kept):
        if path.is_file():
            try:
                found = CapacityFile.load(path)
                found.check_fingerprint(expected)
            except ConfigError as error:
                progress(f"cost curve: {path} is not used: {error}")
                continue
            progress(f"cost curve from {path}")
            return found.curve
    return _measured_now(target, drafter, expected, limits=limits, kept=kept, progress=progress)


def _measured_now(
    target: TargetExecutor,
    drafter: Drafter,
    fingerprint: Fingerprint,
    *,
    limits: EngineLimits,
    kept: Path,
    progress: Progress,
) -> CostCurve | None:
    started = time.perf_counter()
    busy = os.getloadavg()[0] > (os.cpu_count() or 1) + 1.0
    progress(f"cost curve: measuring this machine once, about {_QUICK_S:.0f} s")
    try:
        curve = measure_pair(
            target,
            drafter,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_batch_size=limits.max_batch_size,
            max_context_len=limits.max_context_len,
            seconds=_QUICK_S,
            quick=True,
        )
    except ConfigError as error:
        progress(f"cost curve: not measured, it is learnt while serving: {error}")
        return None
    seconds = time.perf_counter() - started
    if busy:
        progress(f"cost curve: measured in {seconds:.1f} s, not kept: other work is running on this machine")
        return curve
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        CapacityFile(fingerprint=fingerprint, curve=curve).save(kept)
        progress(f"cost curve: 1 to {curve.max_target_tokens} rows in {seconds:.1f} s, kept in {kept}")
    except OSError as error:
        progress(f"cost curve: measured in {seconds:.1f} s, not kept: {error}")
    return curve


def measure_pair(
    target: TargetExecutor,
    drafter: Drafter,
    *,
    num_pages: int,
    page_size: int,
    max_batch_size: int,
    max_context_len: int,
    seconds: float,
    max_target_tokens: int = 0,
    quick: bool = False,
    progress: Callable[[float, str], None] = lambda _share, _text: None,
) -> CostCurve:
    """Measure a pair whose caches, of `num_pages` pages, are allocated and hold nothing.

    Arguments:
        max_batch_size: most sequences of a pass, and that are drafted together.
        max_target_tokens: rows of the largest pass; 0 = a full batch of full blocks. Less when the cache is small.
        seconds: to spend.
        quick: see `measure_curve`.

    Raises:
        ConfigError: the cache is too small to measure in, or the machine gives no usable curve.
    """
    long_context = min(_QUICK_CONTEXT, max_context_len // 2) if quick else 1024
    most = max_target_tokens or max_batch_size * (1 + drafter.block_size)
    while most >= _LEAST_ROWS and num_pages < pages_needed(
        max_target_tokens=most, page_size=page_size, long_context=long_context, max_sequences=max_batch_size
    ):
        most //= 2
    if most < _LEAST_ROWS or max_context_len < 4 * page_size:
        raise ConfigError(
            f"cache of {num_pages} pages of {page_size} tokens, context of {max_context_len}: allowed is room for"
            f" a pass of {_LEAST_ROWS} rows behind {4 * page_size} tokens; give more cache bytes"
        )
    return measure_curve(
        Bench(
            target=target,
            drafter=drafter,
            page_size=page_size,
            long_context=long_context,
            max_sequences=max_batch_size,
            most_rows=rows_of_a_sequence(most, max_batch_size),
        ),
        max_target_tokens=most,
        max_blocks=min(max_batch_size, most),
        budget_s=seconds,
        clock=time.perf_counter,
        progress=progress,
        max_context_len=max_context_len,
        quick=quick,
    )


def _digest(fingerprint: Fingerprint, max_batch_size: int) -> str:
    text = json.dumps({**asdict(fingerprint), "max_batch_size": max_batch_size}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
