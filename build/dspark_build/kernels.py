"""`dspark-build kernels`: compile the device kernels ahead of time, for GPUs that need not be there.

Leaves cubins and a manifest.json that tells, for each, what it takes of a multiprocessor and every argument in order. A
kernel whose inputs did not change is not compiled again; files appear under their names when they are whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.sets import BLOCK_SIZES, HEADS, SHAPES, variants_for
from dspark_plugins.kernels.signatures import arguments_of

from dspark_build.files import write_atomically, write_text
from dspark_build.folder_lock import locked_folder
from dspark_build.progress import ProgressLine, say

__all__ = ["KernelEntry", "add_kernels_arguments", "build_kernels", "load_kernel_manifest", "run_kernels"]

T = TypeVar("T")

FORMAT_VERSION = 1
NAME = "manifest.json"
_PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEntry:
    """One cubin of the manifest."""

    key: str  # names the form; unique together with sm
    kernel: str
    sm: int
    file: str  # beside the manifest
    sha256: str  # of the file
    inputs: str  # hash of all that the file was made from
    symbol: str  # function in the cubin
    arguments: list[list[str]]  # [name, type] in order; two pointers of the compiler's own follow, pass 0
    constants: dict[str, int | float | bool | str]
    num_threads: int  # of a program
    cooperative: bool  # launch cooperatively, with no more programs than fit
    shared_bytes: int  # dynamic shared memory of a program
    registers: int  # of a thread
    stack_bytes: int  # of a thread
    spill_bytes: int  # of a thread
    programs_per_sm: int


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    known = ", ".join(f"{sm} ({chip.product})" for sm, chip in CHIPS.items())
    parser.add_argument("--sm", required=True, help=f"compute capabilities, with commas: {known}")
    parser.add_argument("--out", type=Path, required=True, help="folder for cubins and manifest.json")
    parser.add_argument(
        "--models", default=",".join(SHAPES), help="targets, with commas (default %(default)s)"
    )
    parser.add_argument(
        "--precision", default="bf16", help="bf16, fp16, fp32, with commas (default %(default)s)"
    )
    parser.add_argument(
        "--heads", default="vanilla", help=f"{', '.join(HEADS)}, with commas (default %(default)s)"
    )
    parser.add_argument("--rank", type=int, default=256, help="of the sequential head (default %(default)s)")
    parser.add_argument(
        "--block",
        default=",".join(str(size) for size in BLOCK_SIZES),
        help="drafts of a block, with commas (default %(default)s)",
    )
    parser.add_argument("--window", action="store_true", help="forms for sliding windows too")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default %(default)s)"
    )
    parser.add_argument("--docs", type=Path, help="page whose tables to write anew, such as docs/kernels.md")


def run_kernels(args: argparse.Namespace) -> int:
    """Compile what is missing, tell what came out; status 1 when a kernel spills.

    Raises:
        ConfigError: an unknown architecture, target, precision or head, or no Triton language.
        CapacityError: a kernel needs more shared memory than an architecture has.
        EngineError: a form that cannot be compiled, such as that of a huge rank.
    """
    sms = _chosen(args.sm, "--sm", {str(sm): sm for sm in CHIPS})
    shapes = _chosen(args.models, "--models", SHAPES)
    precisions = _chosen(args.precision, "--precision", {name: name for name in _PRECISIONS})
    heads = _chosen(args.heads, "--heads", {name: name for name in HEADS})
    blocks = [int(text) if text.isdecimal() else 0 for text in _words(args.block)]
    if min(blocks, default=0) < 1:
        raise ConfigError(f"--block: got {args.block!r}, allowed are whole numbers of 1 or more, with commas")
    for option in ("rank", "jobs"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option}: got {getattr(args, option)}, allowed is 1 or more")
    if find_spec("triton") is None:
        raise ConfigError("compiling kernels needs the Triton language: pip install 'dspark-triton[kernels]'")
    variants: dict[str, Variant] = {}
    for shape in shapes:
        for dtype in precisions:
            for head in heads:
                for variant in variants_for(
                    shape, dtype=dtype, head=head, rank=args.rank, block_sizes=blocks, window=args.window
                ):
                    variants[variant.key] = variant
    entries = build_kernels(list(variants.values()), sms, args.out, num_jobs=args.jobs)
    if args.docs is not None:
        from dspark_build.kernel_report import write_tables

        write_tables(args.docs, entries, shapes)
        say(f"tables written to {args.docs}")
    spilling = [entry for entry in entries if entry.spill_bytes]
    for entry in spilling:
        say(f"spills {entry.spill_bytes} bytes a thread on sm {entry.sm}: {entry.key}")
    return 1 if spilling else 0


def build_kernels(
    variants: Sequence[Variant], sms: Sequence[int], out: Path, *, num_jobs: int, quiet: bool = False
) -> list[KernelEntry]:
    """Bring a folder up to date and return what is in it now.

    Arguments:
        quiet: show progress alone, not the folder.

    Raises:
        CapacityError: a kernel needs more shared memory than an architecture has, the disk is full, or a compiling
            process was ended from outside.
        EngineError: a form that cannot be compiled.
        ConfigError: another build is at work in the folder, or it cannot be written.
    """
    with locked_folder(out):
        return _build_all(variants, sms, out, num_jobs=num_jobs, quiet=quiet)


def _build_all(
    variants: Sequence[Variant], sms: Sequence[int], out: Path, *, num_jobs: int, quiet: bool
) -> list[KernelEntry]:
    tell = (lambda _: None) if quiet else say
    tools = _tool_versions()
    source = _source_hash()
    wanted = {
        (variant.key, sm): (variant, sm, _inputs(variant, sm, source, tools))
        for variant in variants
        for sm in sms
    }
    kept = {
        (entry.key, entry.sm): entry
        for entry in _existing(out)
        if (entry.key, entry.sm) in wanted
        and entry.inputs == wanted[entry.key, entry.sm][2]
        and _hash_of(out / entry.file) == entry.sha256
    }
    missing = [job for pair, job in wanted.items() if pair not in kept]
    if not missing and set(kept) == {(e.key, e.sm) for e in _existing(out)}:
        say(f"nothing to do: the {len(kept)} kernels in {out} were made from the same inputs")
        return [kept[pair] for pair in wanted]
    tell(
        f"{len(missing)} of {len(wanted)} kernels to compile, triton {tools['triton']}, ptxas {tools['ptxas']}"
    )
    made = {(entry.key, entry.sm): entry for entry in _compile_all(missing, out, num_jobs)}
    entries = [kept.get(pair) or made[pair] for pair in wanted]
    manifest = {
        "format_version": FORMAT_VERSION,
        "tools": tools,
        "kernels": [asdict(entry) for entry in entries],
    }
    write_text(out / NAME, json.dumps(manifest, indent=1) + "\n")
    _remove_strangers(out, {entry.file for entry in entries})
    size = sum((out / entry.file).stat().st_size for entry in entries)
    tell(f"{len(entries)} kernels, {size / 1e6:.1f} MB, and {NAME} in {out}")
    return entries


def load_kernel_manifest(out: Path) -> list[KernelEntry]:
    """Read a folder's manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    path = out / NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {raw['format_version']!r}"
            )
        return [KernelEntry(**entry) for entry in raw["kernels"]]
    except FileNotFoundError as error:
        raise CheckpointError(f"{out}: has no {NAME}; make it with `dspark-build kernels`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _existing(out: Path) -> list[KernelEntry]:
    """Return what an earlier run left, nothing where it cannot be used."""
    try:
        return load_kernel_manifest(out)
    except CheckpointError:
        return []


def _compile_all(jobs: Sequence[tuple[Variant, int, str]], out: Path, num_jobs: int) -> Iterator[KernelEntry]:
    progress = ProgressLine()
    # Fresh processes: the compiler is not made for forks, and the interpreter may be chosen in this one.
    with ProcessPoolExecutor(
        min(num_jobs, max(len(jobs), 1)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_compiling,
    ) as pool:
        waiting = {pool.submit(_compile, variant, sm): (variant, sm, inputs) for variant, sm, inputs in jobs}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                variant, sm, inputs = waiting[future]
                yield _entry(variant, sm, inputs, future.result(), out)
                progress.show(
                    done / len(jobs),
                    f"{done}/{len(jobs)}  sm {sm}  {variant.kernel}",
                    force=done == len(jobs),
                )
        except BrokenProcessPool as error:
            raise CapacityError(
                "a compiling process was ended from outside, most likely for want of memory; take fewer --jobs"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            progress.close()


def _start_compiling() -> None:
    """Make a fresh process ready: no interpreter, and no life of its own behind a parent that was killed."""
    os.environ.pop("TRITON_INTERPRET", None)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _compile(variant: Variant, sm: int) -> Any:
    from dspark_plugins.kernels.compilation import compile_kernel

    try:
        return compile_kernel(variant, sm)
    except (
        Exception
    ) as error:  # the compiler's own, of many kinds; some of them do not travel between processes
        reason = str(error).strip().rpartition("\n")[2][:300]
        raise EngineError(
            f"{variant.key}: cannot be compiled for sm {sm}: {type(error).__name__}: {reason}"
        ) from None


def _entry(variant: Variant, sm: int, inputs: str, compiled: Any, out: Path) -> KernelEntry:
    chip = CHIPS[sm]
    if compiled.shared_bytes > chip.shared_per_program:
        raise CapacityError(
            f"{variant.key} needs {compiled.shared_bytes} bytes of shared memory, "
            f"sm {sm} gives a program {chip.shared_per_program}; take a narrower precision or a smaller head"
        )
    digest = hashlib.sha256(compiled.cubin).hexdigest()
    file = f"sm{sm}/{variant.kernel}-{inputs[:16]}.cubin"
    write_atomically(out / file, lambda stream: _write(stream, compiled.cubin))
    return KernelEntry(
        key=variant.key,
        kernel=variant.kernel,
        sm=sm,
        file=file,
        sha256=digest,
        inputs=inputs,
        symbol=compiled.symbol,
        arguments=[list(pair) for pair in arguments_of(variant)],
        constants=dict(variant.constants),
        num_threads=compiled.num_threads,
        cooperative=variant.cooperative,
        shared_bytes=compiled.shared_bytes,
        registers=compiled.registers,
        stack_bytes=compiled.stack_bytes,
        spill_bytes=compiled.spill_bytes,
        programs_per_sm=chip.programs(
            num_threads=compiled.num_threads, registers=compiled.registers, shared_bytes=compiled.shared_bytes
        ),
    )


def _write(stream: Any, data: bytes) -> None:
    stream.write(data)


def _inputs(variant: Variant, sm: int, source: str, tools: dict[str, str]) -> str:
    """Return the hash of all that decides a cubin."""
    told = json.dumps(
        [asdict(variant), sm, source, tools, arguments_of(variant)], sort_keys=True, default=dict
    )
    return hashlib.sha256(told.encode()).hexdigest()


def _source_hash() -> str:
    """Return the hash of the device code."""
    import dspark_plugins.kernels

    digest = hashlib.sha256()
    for path in sorted(Path(dspark_plugins.kernels.__file__ or "").parent.glob("*.py")):
        if path.name not in (
            "sets.py",
            "chips.py",
            "plans.py",
        ):  # say which forms there are; a form is hashed itself
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _tool_versions() -> dict[str, str]:
    from dspark_plugins.kernels.compilation import tool_versions

    return tool_versions()


def _hash_of(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _remove_strangers(out: Path, files: set[str]) -> None:
    """Remove cubins that the manifest does not name any more."""
    for path in out.glob("sm*/*.cubin"):
        if path.relative_to(out).as_posix() not in files:
            path.unlink()


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _chosen(text: str, option: str, table: dict[str, T]) -> list[T]:
    """Return what the words of an option name, at least one. Raises ConfigError."""
    words = _words(text)
    unknown = [word for word in words if word not in table]
    if unknown or not words:
        raise ConfigError(f"{option}: got {(unknown or [text])[0]!r}, known are {', '.join(table)}")
    return [table[word] for word in words]
