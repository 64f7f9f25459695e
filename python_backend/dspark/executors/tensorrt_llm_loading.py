"""From settings to a language model of TensorRT-LLM's LLM API: its arguments, the files it reads, the thread around it.

The only file that imports tensorrt_llm. See `tensorrt_llm` for the version whose reference was followed. Unproven.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config import DTYPES, ServeConfig
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.identity import drafter_identity
from dspark.drafters.loading import DrafterOutline
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.admission import EngineLimits
from dspark.errors import ConfigError, EngineError
from dspark.executors.tensorrt_llm import (
    API_VERSION,
    Speculation,
    calibration_table,
    cost_table,
    dspark_speculation,
    ngram_speculation,
)
from dspark.executors.tensorrt_llm_thread import TensorRTLLMThread
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint
from dspark.scheduling.cost_model import CapacityFile, CostCurve
from dspark.serving.paths import state_dir

__all__ = ["LoadedLanguageModel", "load_language_model"]

_OURS = {  # its argument: our setting
    "model": "target",
    "tokenizer": "target",
    "skip_tokenizer_init": "target",
    "dtype": "dtype",
    "speculative_config": "drafter",
    "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_step_tokens",
    "max_seq_len": "max_context_len",
}
_DTYPES = tuple(name for name in DTYPES if name != "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLanguageModel:
    """A thread that nobody has started yet, and what it was made with."""

    thread: TensorRTLLMThread
    limits: EngineLimits


def load_language_model(
    config: ServeConfig,
    target: TargetCheckpoint,
    *,
    spec: str,
    outline: DrafterOutline,
    temperatures: tuple[float, ...] | None,
    base: Path | None,
    progress: Callable[[str], None],
) -> LoadedLanguageModel:
    """Load the target with TensorRT-LLM, on as many GPUs as the file that `engine` names says.

    Arguments:
        spec, outline: the drafter.
        temperatures: [G] of the offline calibration, None where there is none.
        base: folder of model.yaml, in which files are looked up, too.

    Raises:
        ConfigError: settings it cannot meet, or TensorRT-LLM is not installed or refuses its arguments.
        EngineError: it cannot load the model.
    """
    _check_settings(config)
    limits = _limits(config, target.config)
    speculation = _speculation(config, target.config, spec, outline, temperatures, base=base)
    arguments = _arguments(config, limits, speculation, base=base)
    trt, api = _import()
    progress(f"TensorRT-LLM {trt.__version__}; written after the reference of {API_VERSION}, never run here")
    if speculation is not None:
        arguments["speculative_config"] = _decoding_config(trt, api, speculation)
    progress("loading with TensorRT-LLM: " + ", ".join(f"{n}={v!r}" for n, v in arguments.items()))
    try:
        model = trt.LLM(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"executor: TensorRT-LLM {trt.__version__} refuses its arguments: {error}"
        ) from error
    except Exception as error:  # of whatever layer of it
        raise EngineError(f"TensorRT-LLM cannot load {config.target}: {error!r}") from error
    thread = TensorRTLLMThread(
        model,
        make_sampling=trt.SamplingParams,
        target=target.config,
        tokenizer=target.tokenizer,
        limits=limits,
        block_size=0 if speculation is None else speculation.block_size,
        schedules=speculation is not None and speculation.schedules,
        max_queue_size=config.max_queue_size,
    )
    return LoadedLanguageModel(thread=thread, limits=limits)


def _check_settings(config: ServeConfig) -> None:
    problems = []
    if Path(config.target).suffix == ".gguf":
        problems.append(
            f"target: got {config.target}, allowed with executor tensorrt_llm is a folder or a hub name"
        )
    if config.dtype not in _DTYPES:
        problems.append(
            f"dtype: got {config.dtype!r}, allowed with executor tensorrt_llm is {', '.join(_DTYPES)}"
        )
    if config.page_size < 2 or config.page_size & (config.page_size - 1):
        problems.append(
            f"page_size: got {config.page_size}, allowed with executor tensorrt_llm is a power of two from 2"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _limits(config: ServeConfig, target: TargetConfig) -> EngineLimits:
    """Return limits without any of the cache: which pages there are is TensorRT-LLM's own affair."""
    context = config.max_context_len or target.max_context_len
    if context > target.max_context_len:
        allowed = f"allowed is at most the model's {target.max_context_len}"
        raise ConfigError(f"max_context_len: got {context}, {allowed}")
    return EngineLimits(
        max_batch_size=config.max_batch_size,
        max_context_len=context,
        max_step_tokens=config.max_step_tokens,
        num_pages=config.max_batch_size * -(-context // config.page_size),
        page_size=config.page_size,
    )


def _speculation(
    config: ServeConfig,
    target: TargetConfig,
    spec: str,
    outline: DrafterOutline,
    temperatures: tuple[float, ...] | None,
    *,
    base: Path | None,
) -> Speculation | None:
    """Return how it drafts, after writing the files that it reads."""
    if spec == "none":
        return None
    if not outline.feature_layer_ids:
        ngram = NgramDrafter()
        return ngram_speculation(
            block_size=ngram.block_size, max_match=ngram.max_match, policy=config.policy, rule=config.rule
        )
    if config.prompt_lookup:
        raise ConfigError("prompt_lookup: got true, allowed with executor tensorrt_llm is false")
    if config.draft_tree:
        raise ConfigError(f"draft_tree: got {config.draft_tree}, allowed with executor tensorrt_llm is 0")
    drafter = load_drafter_checkpoint(spec, target=target)
    curve = _curve(config, target, spec, base=base)
    folder = state_dir() / "tensorrt_llm" / drafter_identity(spec)[:24]
    calibrated = temperatures is not None and set(temperatures) != {1.0}
    speculation = dspark_speculation(
        drafter.config,
        drafter.folder,
        policy=config.policy,
        rule=config.rule,
        cost_table_path=None if curve is None else folder / "cost_table.json",
        calibration_path=folder / "calibration.json" if calibrated else None,
    )
    if speculation is not None and speculation.schedules and curve is not None:
        _write(folder / "cost_table.json", cost_table(curve))
        if calibrated and temperatures is not None:
            _write(folder / "calibration.json", calibration_table(temperatures))
    return speculation


def _curve(config: ServeConfig, target: TargetConfig, spec: str, *, base: Path | None) -> CostCurve | None:
    """Return the cost curve of TensorRT-LLM with this pair: only a file has one, since its passes cannot be timed here.

    Raises:
        ConfigError: the file that was named cannot be used, or is of another executor or pair.
    """
    if config.capacity == "none":
        return None
    named = config.capacity != "auto"
    path = Path(config.capacity if named else "capacity.json").expanduser()
    if base is not None and not (named and path.is_file()):
        path = base / path
    if not named and (base is None or not path.is_file()):
        return None
    file = CapacityFile.load(path)
    wanted = {
        "executor": "tensorrt_llm",
        "target_hash": target.model_hash,
        "drafter": drafter_identity(spec),
    }
    for name, here in wanted.items():
        found = getattr(file.fingerprint, name)
        if found != here:
            if not named:
                return None
            raise ConfigError(f"capacity: {path}: {name} is {found!r} in the file and {here!r} here")
    return file.curve


def _arguments(
    config: ServeConfig, limits: EngineLimits, speculation: Speculation | None, *, base: Path | None
) -> dict[str, Any]:
    """Return the arguments of `LLM` but for the decoding configuration."""
    given = _llm_file(config.engine, base=base) if config.engine else {}
    for name, setting in _OURS.items():
        if name in given:
            raise ConfigError(f"engine: {config.engine}: {name} is not its to say; set {setting} instead")
    block = 0 if speculation is None else speculation.block_size
    return {
        # Prompts longer than a step, as our engine takes them.
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "max_gpu_total_bytes": config.cache_bytes,
            "tokens_per_block": config.page_size,
        },
        **given,
        "model": config.target,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_step_tokens + limits.max_batch_size * (1 + block),
        "max_seq_len": limits.max_context_len,
    }


def _llm_file(name: str, *, base: Path | None) -> dict[str, Any]:
    """Read a YAML file of `TorchLlmArgs`, such as `trtllm-serve --config` takes: parallelism, cache, quantisation."""
    import yaml

    path = Path(name).expanduser()
    if base is not None and not path.exists():
        path = base / path
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"engine: got {name!r}, allowed with executor tensorrt_llm is a YAML file of its LLM arguments: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"engine: {path}: got a {type(content).__name__}, allowed is a mapping")
    return {str(key): value for key, value in content.items()}


def _import() -> tuple[Any, Any]:
    """Return tensorrt_llm and its llmapi.

    Raises:
        ConfigError: it is not installed, or cannot be loaded here.
    """
    try:
        return importlib.import_module("tensorrt_llm"), importlib.import_module("tensorrt_llm.llmapi")
    except (ImportError, OSError, RuntimeError) as error:  # libraries of CUDA or MPI that are not there, too
        raise ConfigError(
            f"executor: tensorrt_llm needs TensorRT-LLM {API_VERSION} or later ({error}); NVIDIA's containers have it, "
            "see docs/tensorrt.md"
        ) from error


def _decoding_config(trt: Any, api: Any, speculation: Speculation) -> Any:
    made = getattr(api, speculation.config_class, None)
    if made is None:
        raise ConfigError(
            f"executor: TensorRT-LLM {trt.__version__} has no {speculation.config_class}; {API_VERSION} has"
        )
    try:
        return made(**speculation.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"drafter: TensorRT-LLM {trt.__version__} refuses {speculation.config_class}: {error}"
        ) from error


def _write(path: Path, content: object) -> None:
    """Write a file that is whole or not there at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
