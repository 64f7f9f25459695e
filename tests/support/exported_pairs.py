"""A tiny target and drafter, their export, and engines that run it on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint
from dspark.drafters.none import NoneDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_loading import EnginePair, engine_shapes, load_engine_pair
from dspark.models.loading import TargetCheckpoint, load_target
from dspark.scheduling.scheduler import make_scheduler
from dspark_build.export import ExportJob, export_pair

from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import write_tiny_target

__all__ = ["LIMITS", "PAGE", "SHAPES", "Home"]

PAGE = 4
LIMITS = EngineLimits(max_batch_size=4, max_context_len=64, max_step_tokens=6, num_pages=48, page_size=PAGE)
SHAPES = engine_shapes(max_sequences=4, max_step_tokens=6, max_context_len=64, page_size=PAGE, block_size=4)


class Home:
    """Checkpoints and their export."""

    def __init__(self, folder: Path, **drafter: Any) -> None:
        self.folder = folder
        write_tiny_target(folder / "target", max_context_len=64)
        if drafter.pop("random", False):
            write_tiny_drafter(folder / "drafter", folder / "target", **drafter)
        else:
            write_good_drafter(folder / "drafter", folder / "target", noise=0.1, **drafter)
        self.target: TargetCheckpoint = load_target(folder / "target")
        self.drafter: DrafterCheckpoint = load_drafter_checkpoint(
            folder / "drafter", target=self.target.config
        )
        job = ExportJob(target=self.target, drafter=self.drafter, precision="fp32", page_size=PAGE)
        export_pair(job, folder / "onnx")

    def pair(self, shapes: EngineShapes = SHAPES) -> EnginePair:
        return load_engine_pair(
            self.folder / "onnx",
            target=self.target,
            drafter=self.drafter,
            page_size=PAGE,
            shapes=shapes,
            backend="onnxruntime",
            num_threads=1,
        )

    def engine(self, policy: str, rule: Literal["auto", "rejection", "coupled"] = "auto") -> Engine:
        """Return an engine over the export; policy none does not draft."""
        target, drafter = self.pair()
        assert drafter is not None
        drafts = policy != "none"
        used = drafter if drafts else NoneDrafter()
        for part in (target, used):
            part.allocate_cache(num_pages=LIMITS.num_pages, page_size=PAGE)
        return Engine(
            target=target,
            drafter=used,
            scheduler=make_scheduler(
                policy, block_size=4 if drafts else 0, has_confidence=False, cost_model=None, calibrator=None
            ),
            limits=LIMITS,
            rule=rule,
        )
