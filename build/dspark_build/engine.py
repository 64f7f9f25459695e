"""`dspark-build engine`: a target, and a drafter beside it, as TensorRT plans for a GPU that need not be there.

Leaves target.plan, drafter.plan, the tables that both read, engine.json (what they were built from, and for what),
export.json (what the runtime checks) and a page of layers for each plan. Files appear under their names when they are
whole, engine.json last.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import dspark_plugins
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CheckpointError, ConfigError
from dspark.executors.tensorrt_bindings import (
    TABLE_SUFFIX,
    Binding,
    Precision,
    drafter_bindings,
    target_bindings,
)
from dspark.executors.tensorrt_manifest import ENGINE_NAME, EXPORT_NAME, ExportedFile, ExportManifest
from dspark.models.loading import load_target
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.tensorrt.module import INSTALL, tensorrt_name

from dspark_build.engine_manifest import (
    EngineManifest,
    PlanFile,
    TableFile,
    load_engine_manifest,
    whole_engine,
)
from dspark_build.engine_profiles import EngineLimits, profile_shapes, profiles_of
from dspark_build.engine_report import report_text
from dspark_build.export import ExportJob, check_page_size, export_pair
from dspark_build.export_inputs import EXPORT_SOURCES, inputs_hash
from dspark_build.files import write_atomically, write_text
from dspark_build.folder_lock import locked_folder, remove_abandoned
from dspark_build.progress import say

if TYPE_CHECKING:
    from dspark_build.engine_tables import SharedTable

__all__ = ["add_engine_arguments", "build_engines", "run_engine"]

_PRECISIONS = get_args(Precision)
_DEFAULT_BLOCK = 7  # without a drafter's own: n-gram drafters and the like


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    known = ", ".join(f"{sm} ({chip.product})" for sm, chip in CHIPS.items())
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face folder, GGUF file or hub name")
    add("--drafter", default="none", help="drafter folder or none (default %(default)s)")
    add(
        "--sm",
        required=True,
        help=f"compute capability: {known}; TensorRT for RTX knows 80, 86, 89, 120 of these",
    )
    add("--out", type=Path, required=True, help="folder for plans and manifests")
    add("--precision", default="bf16", help=f"{', '.join(_PRECISIONS)} (default %(default)s)")
    add("--max-batch", type=int, default=16, help="sequences (default %(default)s)")
    add("--max-tokens", type=int, default=2048, help="prompt rows of a step (default %(default)s)")
    add("--max-pages", type=int, default=130, help="cache pages of a sequence (default %(default)s)")
    add("--page-size", type=int, default=16, help="tokens of a cache page (default %(default)s)")
    add("--onnx", type=Path, help="folder of the graphs, kept and used again (default: made and removed)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile (default %(default)s)")


def run_engine(args: argparse.Namespace) -> int:
    """Build, tell what came out.

    Raises:
        ConfigError: no TensorRT, an unknown architecture, precision or limit, an unusable --out.
        CheckpointError: a target or drafter that cannot be read, or a drafter for another target.
        EngineError: TensorRT cannot build it.
        CapacityError: the disk is full.
    """
    if args.precision not in _PRECISIONS:
        raise ConfigError(f"--precision: got {args.precision!r}, allowed are {', '.join(_PRECISIONS)}")
    check_page_size(args.page_size)
    for option in ("max_batch", "max_tokens", "max_pages", "jobs"):
        if getattr(args, option) < 1:
            raise ConfigError(
                f"--{option.replace('_', '-')}: got {getattr(args, option)}, allowed is 1 or more"
            )
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out: must be a folder, got the file {str(args.out)!r}")
    if args.onnx is not None and args.out.resolve().is_relative_to(args.onnx.resolve()):
        raise ConfigError(
            f"--onnx: that folder is replaced as a whole, so --out must not be in it; got {str(args.onnx)!r}"
        )
    sm = _architecture(args.sm, args.precision)
    target = load_target(args.target)
    drafter = None
    if args.drafter != "none":
        if not Path(args.drafter).is_dir():
            raise ConfigError(f"--drafter: must be none or the folder of a checkpoint, got {args.drafter!r}")
        drafter = load_drafter_checkpoint(args.drafter, target=target.config)
    job = ExportJob(
        target=target,
        drafter=drafter,
        precision=cast(Precision, args.precision),
        page_size=args.page_size,
    )
    limits = EngineLimits(
        max_batch=args.max_batch,
        max_tokens=args.max_tokens,
        max_pages=args.max_pages,
        page_size=args.page_size,
        block_size=drafter.config.block_size if drafter else _DEFAULT_BLOCK,
    )
    build_engines(job, limits, sm, args.out, graphs=args.onnx, num_jobs=args.jobs)
    return 0


def _architecture(text: str, precision: str) -> int:
    """Return a compute capability that both TensorRT and our kernels have.

    Raises:
        ConfigError: it is none, or TensorRT is missing.
    """
    if tensorrt_name() is None:
        raise ConfigError(f"building engines needs TensorRT: {INSTALL}")
    for module in ("onnx", "ml_dtypes", "triton"):
        if find_spec(module) is None:
            raise ConfigError(f"building engines needs {module}: pip install 'dspark-triton[tensorrt]'")
    from dspark_build.engine_plan import check_architecture, known_architectures

    built = known_architectures()
    known = ", ".join(str(sm) for sm in CHIPS if sm in built or not built)
    if not text.isdecimal():
        raise ConfigError(f"--sm: got {text!r}, allowed is one of {known}")
    check_architecture(int(text), precision)
    if int(text) not in CHIPS:
        raise ConfigError(f"--sm: got {text}, for which there are no kernels; allowed is one of {known}")
    return int(text)


def build_engines(
    job: ExportJob, limits: EngineLimits, sm: int, out: Path, *, graphs: Path | None, num_jobs: int
) -> EngineManifest:
    """Bring a folder up to date and return its manifest.

    Arguments:
        graphs: where to keep the ONNX files; None = nowhere.
        num_jobs: processes that compile kernels.

    Raises:
        ConfigError: limits that TensorRT does not take, a folder that another build is at work in or that cannot
            be written.
        EngineError: TensorRT cannot build it.
        CapacityError: the disk is full.
    """
    _check_shapes(job, limits)
    with locked_folder(out):
        return _build_all(job, limits, sm, out, graphs=graphs, num_jobs=num_jobs)


def _build_all(
    job: ExportJob, limits: EngineLimits, sm: int, out: Path, *, graphs: Path | None, num_jobs: int
) -> EngineManifest:
    from dspark_build.engine_tables import load_graphs, shared_tables_of, with_table_inputs

    tools = _tools()
    inputs = _inputs(job, limits, sm, tools)
    found = _unchanged(out, inputs)
    if found is not None:
        say(f"nothing to do: the plans in {out} were built from the same inputs")
        if graphs is not None:
            export_pair(job, graphs)
        return found
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out: {str(out)!r} cannot be written")
    remove_abandoned(out, ".onnx-*", ".*.part")
    with _graphs(job, graphs, out) as (folder, export):
        for name in (ENGINE_NAME, EXPORT_NAME):
            (out / name).unlink(missing_ok=True)  # from here on the folder is not whole
        parts = {"target": export.target_bindings}
        parts |= {"drafter": export.drafter_bindings} if job.drafter else {}
        graphs_of = load_graphs(folder, parts)
        shared = shared_tables_of(export.drafter_bindings, graphs_of.values())
        tables = tuple(_write_table(table, graphs_of["target"], folder, out) for table in shared)
        plans = tuple(
            _build(
                folder / f"{name}.onnx",
                with_table_inputs(graphs_of[name], shared),
                bindings,
                limits,
                sm,
                out,
                num_jobs,
            )
            for name, bindings in parts.items()
        )
    _remove_strangers(out, plans, tables)
    manifest = EngineManifest(
        tools=tools,
        inputs=inputs,
        sm=sm,
        precision=job.precision,
        target_hash=export.target_hash,
        drafter_hash=export.drafter_hash,
        feature_layer_ids=export.feature_layer_ids,
        block_size=limits.block_size,
        page_size=limits.page_size,
        limits=asdict(limits),
        plans=plans,
        tables=tables,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    write_text(out / EXPORT_NAME, replace(export, files=manifest.files).text())
    write_text(out / ENGINE_NAME, manifest.text())
    size, seconds = sum(file.num_bytes for file in manifest.files), sum(plan.build_s for plan in plans)
    say(
        f"{len(plans)} plans, {len(tables)} tables that they share, for sm {sm}, {size / 1e6:.1f} MB, in {out}: "
        f"{seconds:.0f} s, {manifest.peak_bytes / 1e9:.1f} GB of memory at most"
    )
    return manifest


def _check_shapes(job: ExportJob, limits: EngineLimits) -> None:
    """Refuse tensors that are too large before anything is built."""
    config, precision = job.target.config, job.precision
    tensors = target_bindings(
        config, precision=precision, feature_layer_ids=job.feature_layer_ids, verify=job.verify
    )
    if job.drafter is not None:
        tensors += drafter_bindings(job.drafter.config, precision=precision, shared=())
    for profile in profiles_of(limits):
        profile_shapes(tensors, profile)


def _write_table(table: SharedTable, target: Any, graphs: Path, out: Path) -> TableFile:
    from dspark_build.engine_tables import write_table

    tensor = next(one for one in target.graph.initializer if one.name == table.binding.name)
    file = write_table(table, tensor, graphs, out)
    say(f"{file.name}: {file.num_bytes / 1e6:.1f} MB that target and drafter share")
    return TableFile(file=file, binding=table.binding.name, shape=table.shape)


def _build(
    path: Path,
    model: Any,
    bindings: Sequence[Binding],
    limits: EngineLimits,
    sm: int,
    out: Path,
    num_jobs: int,
) -> PlanFile:
    from dspark_build.engine_kernels import KernelCompiler
    from dspark_build.engine_plan import build_plan, tensorrt_version

    name = path.stem
    say(f"{name}: building for sm {sm} with {tensorrt_version()}")
    compiler, profiles = KernelCompiler(sm, num_jobs=num_jobs), profiles_of(limits)
    start = time.perf_counter()
    built = build_plan(path, model, bindings, profiles, compiler)
    seconds = time.perf_counter() - start
    data = memoryview(built.data)
    write_atomically(out / f"{name}.plan", lambda stream: _write(stream, data))
    title = f"Layers of {name}.plan, sm {sm}"
    write_text(out / f"{name}.layers.md", report_text(title, built.layers, [p.name for p in profiles]))
    kinds = Counter(layer.kind for layer in built.layers)
    spills = {entry.key: entry.spill_bytes for entry in compiler.entries.values() if entry.spill_bytes}
    plugins = len(built.plugin_nodes)
    say(
        f"{name}: {data.nbytes / 1e6:.1f} MB in {seconds:.0f} s; {plugins} of {plugins} plugin nodes are plugins, "
        f"no attention left unfused, {_told_spills(spills)}; {len(built.layers)} layers ({name}.layers.md)"
    )
    for key, spilled in spills.items():
        say(f"{name}: spills {spilled} bytes a thread: {key}")
    return PlanFile(
        file=ExportedFile(
            name=f"{name}.plan", num_bytes=data.nbytes, sha256=hashlib.sha256(data).hexdigest()
        ),
        num_layers=len(built.layers),
        num_plugins=plugins,
        kernels=dict(Counter(entry.kernel for entry in compiler.entries.values())),
        spills=spills,
        kinds=dict(kinds.most_common()),
        bindings=[asdict(binding) for binding in bindings],
        profiles=[{"name": p.name, "sizes": {d: list(r) for d, r in p.sizes.items()}} for p in profiles],
        build_s=round(seconds, 1),
    )


def _told_spills(spills: Mapping[str, int]) -> str:
    return f"{len(spills)} kernels spill" if spills else "no kernel spills"


def _write(stream: Any, data: memoryview) -> None:
    stream.write(data)


@contextmanager
def _graphs(job: ExportJob, kept: Path | None, out: Path) -> Iterator[tuple[Path, ExportManifest]]:
    """Give a folder with the ONNX files."""
    if kept is not None:
        yield kept, export_pair(job, kept)
        return
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=out) as scratch:
        folder = Path(scratch) / "graphs"
        yield folder, export_pair(job, folder)


def _unchanged(out: Path, inputs: str) -> EngineManifest | None:
    """Return the manifest of plans that are whole and of the same inputs; tell what is wrong with others."""
    if not (out / ENGINE_NAME).exists():
        return None
    try:
        if load_engine_manifest(out).inputs == inputs:
            return whole_engine(out)
    except CheckpointError as error:
        say(f"building anew: {error}")
    return None


def _remove_strangers(out: Path, plans: Sequence[PlanFile], tables: Sequence[TableFile]) -> None:
    """Remove plans and tables of an earlier build that this one does not have."""
    if len(plans) < 2:
        for name in ("drafter.plan", "drafter.layers.md"):
            (out / name).unlink(missing_ok=True)
    kept = {table.file.name for table in tables}
    for path in out.glob(f"*{TABLE_SUFFIX}"):
        if path.name not in kept:
            path.unlink()


def _tools() -> dict[str, str]:
    from dspark_plugins.kernels.compilation import tool_versions

    from dspark_build.engine_plan import tensorrt_version

    return {"dspark": version("dspark-triton"), "tensorrt": tensorrt_version(), **tool_versions()}


def _inputs(job: ExportJob, limits: EngineLimits, sm: int, tools: dict[str, str]) -> str:
    """Return the hash of all that decides the plans."""
    plugins, here = Path(dspark_plugins.__file__ or "").parent, Path(__file__).parent
    told = (tools, job.target.config, job.drafter_hash, job.precision, limits, sm)
    own = [
        *(plugins / "kernels").glob("*.py"),
        *(plugins / "tensorrt").glob("*.py"),
        *here.glob("engine*.py"),
    ]
    return inputs_hash(told, [*EXPORT_SOURCES, *own])
