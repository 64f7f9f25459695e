"""`dspark-build export`: a target, and a drafter beside it, as ONNX files that TensorRT and ONNX Runtime read alike.

Leaves target.onnx, drafter.onnx, their weights in .data files and export.json: what they were made from. The
drafter points into the target's weights where it has no table of its own. All of it appears at once, by a rename.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError, ConfigError
from dspark.executors.tensorrt_bindings import Precision, VerifyShape, target_bindings
from dspark.executors.tensorrt_manifest import (
    EXPORT_NAME,
    ExportedFile,
    ExportManifest,
    check_files,
    load_export,
)
from dspark.models.loading import TargetCheckpoint, load_target

from dspark_build.export_inputs import EXPORT_SOURCES, inputs_hash
from dspark_build.files import write_text
from dspark_build.folder_lock import locked_folder, remove_abandoned
from dspark_build.progress import ProgressLine, say

__all__ = ["ExportJob", "add_export_arguments", "check_page_size", "export_pair", "run_export"]

_PRECISIONS = get_args(Precision)
_LARGEST_PAGE = 4096  # tokens; what the setting page_size takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What is exported."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint | None
    precision: Precision
    page_size: int

    @property
    def feature_layer_ids(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids if self.drafter else ()

    @property
    def verify(self) -> VerifyShape:
        return VerifyShape.of(self.drafter.config if self.drafter else None)

    @property
    def drafter_hash(self) -> str:
        return drafter_identity(str(self.drafter.folder)) if self.drafter else ""


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--target", required=True, help="Hugging Face folder, GGUF file or hub name")
    parser.add_argument("--drafter", default="none", help="drafter folder or none (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the graphs, replaced as a whole")
    parser.add_argument("--precision", default="bf16", help=f"{', '.join(_PRECISIONS)} (default %(default)s)")
    parser.add_argument(
        "--page-size", type=int, default=16, help="tokens of a cache page (default %(default)s)"
    )


def run_export(args: argparse.Namespace) -> int:
    """Export, tell what came out.

    Raises:
        ConfigError: an unknown precision, a page size that cannot be, an unusable --out, or no onnx.
        CheckpointError: a target or drafter that cannot be read, or a drafter for another target.
        CapacityError: the disk is full.
    """
    if args.precision not in _PRECISIONS:
        raise ConfigError(f"--precision: got {args.precision!r}, allowed are {', '.join(_PRECISIONS)}")
    check_page_size(args.page_size)
    for module in ("onnx", "ml_dtypes"):
        if find_spec(module) is None:
            raise ConfigError(f"exporting needs {module}: pip install 'dspark-triton[export]'")
    _check_out(args.out)
    target = load_target(args.target)
    drafter = None
    if args.drafter != "none":
        if not Path(args.drafter).is_dir():
            raise ConfigError(f"--drafter: must be none or the folder of a checkpoint, got {args.drafter!r}")
        drafter = load_drafter_checkpoint(args.drafter, target=target.config)
    export_pair(
        ExportJob(
            target=target,
            drafter=drafter,
            precision=cast(Precision, args.precision),
            page_size=args.page_size,
        ),
        args.out,
    )
    return 0


def check_page_size(page_size: int) -> None:
    """Refuse pages that no server takes. Raises ConfigError."""
    if not 1 <= page_size <= _LARGEST_PAGE:
        raise ConfigError(f"--page-size: got {page_size}, allowed is 1 to {_LARGEST_PAGE}")


def export_pair(job: ExportJob, out: Path) -> ExportManifest:
    """Bring a folder up to date and return its manifest.

    Raises:
        ConfigError: a folder that holds something else, or cannot be written.
        CapacityError: the disk is full.
    """
    _check_out(out)
    inputs = _inputs(job)
    found = _whole(out)
    if found is not None and found.inputs == inputs:
        say(f"nothing to do: {out} was made from the same inputs")
        return found
    with _fresh_folder(out) as fresh:
        manifest = _write_models(job, fresh, inputs)
        write_text(fresh / EXPORT_NAME, manifest.text())
    size = sum(file.num_bytes for file in manifest.files)
    say(f"{len(manifest.files)} files, {size / 1e6:.1f} MB, and {EXPORT_NAME} in {out}")
    return manifest


def _write_models(job: ExportJob, folder: Path, inputs: str) -> ExportManifest:
    import onnx

    from dspark_build.export_drafter import drafter_model
    from dspark_build.export_target import target_model
    from dspark_build.export_weights import WeightFile

    config, layers = job.target.config, job.feature_layer_ids
    files: list[ExportedFile] = []

    def write(name: str, num_tensors: int, build: Callable[[WeightFile], onnx.ModelProto]) -> WeightFile:
        with _progress(name, num_tensors) as tell, (folder / f"{name}.data").open("wb") as stream:
            weights = WeightFile(stream, f"{name}.data", tell)
            model = build(weights)
        graph = model.SerializeToString()
        (folder / f"{name}.onnx").write_bytes(graph)
        files.append(
            ExportedFile(name=f"{name}.onnx", num_bytes=len(graph), sha256=hashlib.sha256(graph).hexdigest())
        )
        files.append(ExportedFile(name=weights.name, num_bytes=weights.num_bytes, sha256=weights.sha256))
        onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
        return weights

    target = write(
        "target",
        len(job.target.weights.names()) + job.verify.mapped,
        lambda file: target_model(
            config,
            job.target.weights,
            file,
            precision=job.precision,
            page_size=job.page_size,
            feature_layer_ids=layers,
            verify=job.verify,
            draft_to_target=job.drafter.draft_to_target if job.drafter else None,
        ),
    )
    bindings: tuple[Any, ...] = ()
    drafter = job.drafter
    if drafter is not None:
        head = job.target.weights.float32(
            "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        )

        def build_drafter(file: WeightFile) -> onnx.ModelProto:
            nonlocal bindings
            model, bindings = drafter_model(
                drafter,
                file,
                precision=job.precision,
                page_size=job.page_size,
                target_tensors={tensor.name: tensor for tensor in target.tensors},
                target_head=head,
            )
            return model

        write("drafter", len(drafter.weights.names()), build_drafter)
    return ExportManifest(
        tools=_tools(),
        inputs=inputs,
        target_hash=config.model_hash,
        drafter_hash=job.drafter_hash,
        precision=job.precision,
        page_size=job.page_size,
        feature_layer_ids=layers,
        block_size=drafter.config.block_size if drafter else 0,
        verify=job.verify,
        target_bindings=target_bindings(
            config, precision=job.precision, feature_layer_ids=layers, verify=job.verify
        ),
        drafter_bindings=bindings,
        files=tuple(files),
    )


@contextmanager
def _progress(name: str, num_tensors: int) -> Iterator[Callable[[str], None]]:
    """Show how many of a model's tensors were written."""
    line, done = ProgressLine(), 0

    def tell(tensor: str) -> None:
        nonlocal done
        done += 1
        line.show(done / num_tensors, f"{name}  {done}/{num_tensors}  {tensor}", force=done == num_tensors)

    try:
        yield tell
    finally:
        line.close()


def _tools() -> dict[str, str]:
    return {"dspark": version("dspark-triton"), "onnx": version("onnx"), "domain": "dspark 1"}


def _inputs(job: ExportJob) -> str:
    """Return the hash of all that decides the files."""
    told = (_tools(), job.target.config, job.drafter_hash, job.precision, job.page_size)
    return inputs_hash(told, EXPORT_SOURCES)


def _whole(out: Path) -> ExportManifest | None:
    """Return the manifest of an earlier export whose files are as they were, None where there is none."""
    try:
        manifest = load_export(out)
        check_files(out, manifest, contents=True)
    except CheckpointError:
        return None
    return manifest


def _check_out(out: Path) -> None:
    """Refuse what must not be replaced, before anything is read."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: must be a folder, got the file {str(out)!r}")
    if out.is_dir() and any(out.iterdir()) and not (out / EXPORT_NAME).is_file():
        raise ConfigError(
            f"--out: {str(out)!r} holds something else (no {EXPORT_NAME}); name an empty folder or a new one"
        )


@contextmanager
def _fresh_folder(out: Path) -> Iterator[Path]:
    """Give a folder to fill that takes the place of `out` when all went well and is removed when it did not."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(out.parent, f".{out.name}.new-*", f".{out.name}.old-*")
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.new-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"--out: {str(out)!r} cannot be written: {error}") from error
    try:
        with locked_folder(fresh, shown=out):
            yield fresh
            fresh.chmod(0o755)
            _take_the_place(fresh, out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _take_the_place(fresh: Path, out: Path) -> None:
    """Rename a whole folder to `out`; an earlier one goes, also one that another export puts there meanwhile.

    Raises:
        ConfigError: it cannot be replaced.
    """
    for _ in range(100):
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
        try:
            with suppress(FileNotFoundError):
                os.rename(out, old)  # an empty folder may be renamed over
            os.rename(fresh, out)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise ConfigError(f"--out: {str(out)!r} cannot be replaced: {error}") from error
        finally:
            shutil.rmtree(old, ignore_errors=True)
    raise ConfigError(f"--out: {str(out)!r} is replaced by other exports all the time")
