"""One target and one drafter, loaded once, for benchmarks that run many engines on them, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from dspark.calibration.files import load_calibrator
from dspark.calibration.online import OnlineCalibrator
from dspark.capacity import starting_curve
from dspark.config import ServeConfig
from dspark.drafters.identity import drafter_identity
from dspark.drafters.interface import Drafter
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.executors.loading import choose_executor, make_target
from dspark.models.loading import load_target
from dspark.models.tokenizer import Tokenizer
from dspark.runtime import engine_limits, resolve_drafter
from dspark.scheduling.cost_model import CostCurve
from dspark.scheduling.interface import Scheduler

from dspark_build.prompt_files import read_prompts

__all__ = ["BenchPair", "load_pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPair:
    """What was loaded. Engines made of it share the caches, so only one of them may have work at a time."""

    target: TargetExecutor
    drafter: Drafter
    drafter_name: str  # as it was given, or the folder that auto stood for
    has_confidence: bool
    limits: EngineLimits
    tokenizer: Tokenizer
    curve: CostCurve | None

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def engine(self, scheduler: Scheduler, *, max_batch_size: int) -> Engine:
        """Return a fresh engine: what an earlier one left in the caches is never found again."""
        limits = EngineLimits(
            max_batch_size=max_batch_size,
            max_context_len=self.limits.max_context_len,
            max_step_tokens=self.limits.max_step_tokens,
            num_pages=self.limits.num_pages,
            page_size=self.limits.page_size,
        )
        return Engine(target=self.target, drafter=self.drafter, scheduler=scheduler, limits=limits)

    def calibrator(self, *, chain_len: int = 0) -> OnlineCalibrator | None:
        """Return a calibrator that starts from the drafter's offline fit; None without a confidence head.

        Arguments:
            chain_len: drafts of a chain where `block_size` is that of trees; 0 = `block_size`.
        """
        if not self.has_confidence:
            return None
        return load_calibrator(
            Path(self.drafter_name) / "calibration.json",
            block_size=chain_len or self.block_size,
            drafter_hash=drafter_identity(self.drafter_name),
            target_hash=self.target.config.model_hash,
        )

    def prompts(self, path: Path, *, sources: tuple[str, ...] | None = None) -> list[tuple[int, ...]]:
        """Return the chat prompts of a file as token ids, one kind after the other in turn.

        Raises:
            ConfigError: there is none of these kinds.
        """
        kinds: dict[str, list[tuple[int, ...]]] = {}
        for prompt in read_prompts([path]):
            if sources is None or prompt.source in sources:
                messages = [{"role": "user", "content": prompt.text}]
                kinds.setdefault(prompt.source, []).append(
                    tuple(self.tokenizer.apply_chat_template(messages))
                )
        mixed = [ids for turn in zip_longest(*kinds.values()) for ids in turn if ids is not None]
        if not mixed:
            raise ConfigError(f"{path}: no prompts of {sources}")
        return mixed


def load_pair(
    target: str,
    drafter: str,
    *,
    threads: int,
    max_batch_size: int,
    tell: Callable[[str], None],
    dtype: str = "auto",
) -> BenchPair:
    """Load a pair, allocate its caches, and find or measure its cost curve.

    Arguments:
        drafter: folder, `ngram`, or `auto` for the trained one in model_repository, else `ngram`.
        max_batch_size: most requests at a time.
        dtype: of the target's weights.

    Raises:
        ConfigError, CheckpointError: what cannot be used.
    """
    config = ServeConfig(target=target, num_threads=threads, max_batch_size=max_batch_size, dtype=dtype)
    checkpoint = load_target(target)
    if checkpoint.tokenizer is None:
        raise ConfigError(f"{target}: has no tokenizer, needed for prompts")
    base = Path("model_repository/dspark/1")
    spec = resolve_drafter(drafter, base=base, target_hash=checkpoint.config.model_hash, progress=tell)
    outline = peek_drafter(spec, checkpoint.config)
    executor = choose_executor("auto")
    loaded = make_target(
        checkpoint, executor=executor, dtype=dtype, layer_ids=outline.feature_layer_ids, config=config
    )
    drafting = load_drafter(
        spec, target=checkpoint.config, target_executor=loaded, executor=executor, dtype="auto"
    )
    limits = engine_limits(config, loaded, drafting)
    loaded.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
    drafting.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
    tell(f"target {target} on {loaded.name}, {loaded.dtype}; drafter {spec}, block {outline.block_size}")
    curve = starting_curve(config, loaded, drafting, spec=spec, limits=limits, base=base, progress=tell)
    return BenchPair(
        target=loaded,
        drafter=drafting,
        drafter_name=spec,
        has_confidence=outline.has_confidence,
        limits=limits,
        tokenizer=checkpoint.tokenizer,
        curve=curve,
    )
