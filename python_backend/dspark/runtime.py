"""From settings to a running engine: loads the models, picks the executors, sizes the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.calibration.files import load_calibrator, save_calibrator
from dspark.calibration.online import OnlineCalibrator
from dspark.calibration.tree import BlockCalibrator
from dspark.capacity import starting_curve
from dspark.config import ENGINE_EXECUTORS, ServeConfig
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.identity import drafter_identity
from dspark.drafters.interface import Drafter
from dspark.drafters.kinds import check_kind
from dspark.drafters.layout import read_config_file
from dspark.drafters.loading import DrafterOutline, peek_drafter
from dspark.drafters.lookup import LookupDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.engine.thread import EngineThread
from dspark.errors import ConfigError, EngineError
from dspark.executors.device import chosen_device
from dspark.executors.interface import CacheMover, TargetExecutor
from dspark.executors.loading import LoadedPair, load_pair
from dspark.executors.scheduled import served_policy
from dspark.models.config import TargetConfig
from dspark.models.loading import load_target
from dspark.models.tokenizer import Tokenizer
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import Calibrator
from dspark.scheduling.policy import parse_policy
from dspark.scheduling.scheduler import Scheduler, make_scheduler
from dspark.serving.paths import state_dir

if TYPE_CHECKING:
    from dspark.executors.tensorrt_llm_thread import TensorRTLLMThread

__all__ = ["Runtime", "build_engine", "load_runtime", "resolve_drafter"]

Progress = Callable[[str], None]


INT8_NOTICE = (
    "int8 weights and activations trade quality for speed: the most likely token differs from float32's in 6.6 % of "
    "rows on SmolLM2-135M (bfloat16: 0.4 %); speculation leaves the int8 answers as they are (docs/benchmarks.md)"
)


_MEASURED_ROWS = 4  # of a sequence, in the passes of `scheduling.measurement`


def _silent(_message: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A started engine and what the serving side needs beside it."""

    engine: EngineThread | TensorRTLLMThread
    scheduler: Scheduler  # the engine's; touched by its thread alone
    tokenizer: Tokenizer | None
    target_config: TargetConfig
    limits: EngineLimits
    config: ServeConfig


def load_runtime(config: ServeConfig, *, progress: Progress = _silent, base: Path | None = None) -> Runtime:
    """Load everything and start the engine thread.

    Arguments:
        base: folder of model.yaml, in which `auto` looks for a trained drafter and a cost curve.

    Raises:
        ConfigError, CheckpointError: naming what cannot be used.
    """
    if config.executor == "tensorrt_llm":
        return _tensorrt_llm_runtime(config, progress=progress, base=base)
    engine = build_engine(config, progress=progress, base=base)
    thread = EngineThread(
        engine,
        max_queue_size=config.max_queue_size,
        at_end=_keeper(config, engine, base=base),
    )
    thread.start()
    return Runtime(
        engine=thread,
        scheduler=engine.scheduler,
        tokenizer=engine.tokenizer,
        target_config=engine.target.config,
        limits=engine.limits,
        config=config,
    )


def _tensorrt_llm_runtime(config: ServeConfig, *, progress: Progress, base: Path | None) -> Runtime:
    """Load with TensorRT-LLM and start the thread around it. Arguments and errors as `load_runtime`."""
    from dspark.executors.tensorrt_llm_loading import load_language_model

    progress(f"reading {config.target}")
    checkpoint = load_target(config.target)
    spec = resolve_drafter(
        config.drafter, base=base, target_hash=checkpoint.config.model_hash, progress=progress
    )
    outline = peek_drafter(spec, checkpoint.config)
    check_kind(outline.kind, executor=config.executor)
    calibrator = _calibrator(config, spec, outline, target_hash=checkpoint.config.model_hash)
    loaded = load_language_model(
        config,
        checkpoint,
        spec=spec,
        outline=outline,
        temperatures=None if calibrator is None else tuple(calibrator.temperatures.tolist()),
        base=base,
        progress=progress,
    )
    loaded.thread.start()
    return Runtime(
        engine=loaded.thread,
        # It decides by itself; this one has nothing to tell of.
        scheduler=make_scheduler(
            "none", block_size=0, has_confidence=False, cost_model=None, calibrator=None
        ),
        tokenizer=checkpoint.tokenizer,
        target_config=checkpoint.config,
        limits=loaded.limits,
        config=config,
    )


def build_engine(config: ServeConfig, *, progress: Progress = _silent, base: Path | None = None) -> Engine:
    """Load target and drafter and return an engine that nobody runs yet. Arguments and errors as `load_runtime`."""
    if config.executor == "tensorrt_llm":
        raise ConfigError(
            "executor: got 'tensorrt_llm', which has an engine of its own; serve it with `dspark serve`"
        )
    progress(f"reading {config.target}")
    checkpoint = load_target(config.target)
    spec = resolve_drafter(
        config.drafter, base=base, target_hash=checkpoint.config.model_hash, progress=progress
    )
    outline = peek_drafter(
        spec,
        checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        num_draft_tokens=config.num_draft_tokens,
    )
    pair = load_pair(checkpoint, spec=spec, outline=outline, config=config, base=base)
    target, drafter = pair.target, pair.drafter
    for notice in _notices(config, target):
        progress(notice)
    progress(f"drafter {drafter.name}, block {outline.block_size}")
    trees = bool(config.draft_tree and outline.block_size) and _use_trees(
        target, drafter, size=config.draft_tree, progress=progress
    )
    limits = engine_limits(config, target, drafter, longest=pair.max_context_len)
    on_gpu = chosen_device(config.executor, config.device) != "cpu"
    policy = served_policy(target, config.policy, on_gpu=on_gpu)
    for part in (target, drafter):
        part.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
    progress(f"cache {limits.num_pages * limits.page_size} tokens in pages of {limits.page_size}")
    curve = None
    if outline.block_size and parse_policy(config.policy, block_size=outline.block_size).needs_cost:
        curve = _curve(config, pair, spec=spec, limits=limits, base=base, progress=progress)
    if curve is None and config.policy == "auto":
        policy = "auto"  # learns what a step costs; `lagged` wants it measured
    if policy != config.policy:
        progress(f"policy {policy}: the device chooses what is verified, and no step waits for the host")
    if config.prompt_lookup and isinstance(drafter, (DSparkDrafter, AutoregressiveDrafter)):
        drafter = LookupDrafter(drafter)  # measured without: a look-up is no pass
        progress("prompt look-up before the drafter")
    return Engine(
        target=target,
        drafter=drafter,
        scheduler=make_scheduler(
            policy,
            block_size=drafter.block_size,
            has_confidence=outline.has_confidence,
            cost_model=None if curve is None else CostModel(curve),
            calibrator=_for_blocks(
                _calibrator(config, spec, outline, target_hash=target.config.model_hash),
                chain_len=outline.block_size,
                trees=trees,
            ),
        ),
        limits=limits,
        tokenizer=checkpoint.tokenizer,
        rule=config.rule,
    )


def _use_trees(target: TargetExecutor, drafter: Drafter, *, size: int, progress: Progress) -> bool:
    """Let a drafter that can make trees make them, where the target can verify them; say so, or why not.

    Returns:
        Whether there will be trees.
    """
    if not isinstance(drafter, DSparkDrafter):
        progress(f"draft_tree: left aside, drafter {drafter.name} makes chains")
    elif not isinstance(target, CacheMover):
        progress(f"draft_tree: left aside, executor {target.name} verifies chains")
    else:
        drafter.use_trees(size)
        progress(f"trees of up to {size} drafts for greedy requests")
        return True
    return False


def _for_blocks(calibrator: OnlineCalibrator | None, *, chain_len: int, trees: bool) -> Calibrator | None:
    """Return the calibrator of chains, made to fit blocks that may be trees, and wider than chains are."""
    if calibrator is None or not trees:
        return calibrator
    return BlockCalibrator(calibrator, chain_len=chain_len)


def _notices(config: ServeConfig, target: TargetExecutor) -> Iterator[str]:
    """Yield what is to be told of a loaded target."""
    yield f"target {target.config.architecture}, executor {target.name}, {target.dtype}"
    if target.dtype == "int8":
        yield INT8_NOTICE
    if target.name == "onnxruntime":
        yield "executor onnxruntime runs the exported graphs on the CPU, slowly: it is there to check an export"
    if config.engine and config.executor not in ENGINE_EXECUTORS:
        yield f"engine: {config.engine} is left aside by executor {target.name}"


def _curve(
    config: ServeConfig,
    pair: LoadedPair,
    *,
    spec: str,
    limits: EngineLimits,
    base: Path | None,
    progress: Progress,
) -> CostCurve | None:
    """Return the curve that the engine starts with; None = learn it. Arguments and errors as `starting_curve`."""
    if config.executor in ENGINE_EXECUTORS:
        # Engines take no more sequences than they were made for, and measuring spreads the rows of whole blocks over
        # sequences of fewer rows.
        rows = limits.max_batch_size * _MEASURED_ROWS
        most = max(1, min(limits.max_batch_size, rows // (1 + pair.drafter.block_size)))
        limits = replace(limits, max_batch_size=most)
    try:
        return starting_curve(
            config, pair.target, pair.drafter, spec=spec, limits=limits, base=base, progress=progress
        )
    except EngineError as error:  # made for passes smaller than those that are measured
        progress(f"cost curve: not measured, it is learnt while serving: {error}")
        return None


def resolve_drafter(spec: str, *, base: Path | None, target_hash: str, progress: Progress = _silent) -> str:
    """Return the drafter that `auto` stands for: the one in `base`/drafter if it is of this target, else `ngram`.

    Raises:
        CheckpointError: a drafter whose configuration cannot be read.
    """
    if spec != "auto":
        return spec
    if base is None or not (base / "drafter" / "config.json").is_file():
        return "ngram"
    made_for = read_config_file(base / "drafter").get("target_hash") or target_hash
    if made_for != target_hash:
        progress(f"{base / 'drafter'} was trained for another target: drafter ngram")
        return "ngram"
    return str(base / "drafter")


def _calibrator(
    config: ServeConfig, spec: str, outline: DrafterOutline, *, target_hash: str
) -> OnlineCalibrator | None:
    """Return the calibrator of a drafter with confidences, started from the files that the settings name."""
    if not outline.has_confidence:
        return None
    offline: Path | None = None
    if config.calibration == "auto":
        offline = Path(spec) / "calibration.json"
    elif config.calibration != "none":
        offline = Path(config.calibration).expanduser()
        if not offline.is_file():
            raise ConfigError(f"calibration: got {config.calibration!r}, allowed is a file, auto or none")
    return load_calibrator(
        offline,
        _learned_path(config, spec),
        block_size=outline.block_size,
        drafter_hash=drafter_identity(spec),
        target_hash=target_hash,
    )


def _learned_path(config: ServeConfig, spec: str) -> Path | None:
    if config.learned_calibration == "none":
        return None
    if config.learned_calibration == "auto":
        return state_dir() / "calibration" / f"{drafter_identity(spec)[:24]}.json"
    return Path(config.learned_calibration).expanduser()


def _keeper(config: ServeConfig, engine: Engine, *, base: Path | None) -> Callable[[], object] | None:
    """Return what writes the calibrator's learning where the settings ask for it, None where nothing is kept.

    Place and drafter are told now: the drafter's files may be replaced while it serves.
    """
    calibrator = engine.scheduler.calibrator
    calibrator = calibrator.inner if isinstance(calibrator, BlockCalibrator) else calibrator
    if not isinstance(calibrator, OnlineCalibrator):
        return None
    spec = resolve_drafter(config.drafter, base=base, target_hash=engine.target.config.model_hash)
    path = _learned_path(config, spec)
    if path is None:
        return None
    made_for = drafter_identity(spec)
    return lambda: save_calibrator(path, calibrator, drafter_hash=made_for)


def engine_limits(
    config: ServeConfig, target: TargetExecutor, drafter: Drafter, *, longest: int = 0
) -> EngineLimits:
    """Return limits whose caches, target's and drafter's together, take at most `cache_bytes`.

    Arguments:
        longest: tokens of the longest sequence that the executors take; 0 = the model's context.

    Raises:
        ConfigError: when that is less than one page, or the context asked for is longer than the model's.
    """
    longest = longest or target.config.max_context_len
    context = config.max_context_len or longest
    if context > longest:
        raise ConfigError(f"max_context_len: got {context}, allowed is at most the model's {longest}")
    page_bytes = target.cache_page_bytes(config.page_size) + drafter.cache_page_bytes(config.page_size)
    num_pages = config.cache_bytes // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"cache_bytes: got {config.cache_bytes}, allowed is at least {page_bytes}, one page"
        )
    # More pages than a full batch of the longest sequences could never be used.
    most = config.max_batch_size * -(-context // config.page_size)
    return EngineLimits(
        max_batch_size=config.max_batch_size,
        max_context_len=context,
        max_step_tokens=config.max_step_tokens,
        num_pages=min(num_pages, most),
        page_size=config.page_size,
    )
