"""Settings of one served model: `model.yaml`, then `DSPARK_*` environment variables, then command-line options.

Reading them touches neither model nor torch; every problem is listed at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from dspark.errors import ConfigError
from dspark.sampling.transforms import SampledRule
from dspark.scheduling.policy import POLICIES, parse_policy

__all__ = [
    "NUM_DRAFT_TOKENS",
    "ServeConfig",
    "drafter_dtype",
    "load_serve_config",
    "parse_bytes",
    "read_settings",
]

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
EXECUTOR_DTYPES = {  # of those that read checkpoints
    "native": ("auto", "float32", "bfloat16", "int8"),
    "torch": ("auto", "float32", "bfloat16", "float16"),
}
ENGINE_EXECUTORS = ("tensorrt", "onnxruntime")  # those that run what `engine` holds
EXECUTORS = ("auto", "native", "torch", *ENGINE_EXECUTORS, "tensorrt_llm")
LEAST_RECORD_BYTES = 16 << 20
NUM_DRAFT_TOKENS = 5  # of a drafter that drafts token by token
RULES: tuple[SampledRule, ...] = ("auto", "block", "rejection", "coupled")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What is served and with what limits.

    target: Hugging Face folder, `.gguf` file, or hub name.
    drafter: `none`, `ngram`, a drafter folder (DSpark, DFlash, EAGLE-3, MTP), folder or `.gguf` file of a smaller model
        with the target's tokenizer, or `auto` (the folder `drafter/` beside model.yaml where it was trained for this
        target, else `ngram`).
    num_draft_tokens: most drafts of one step by a drafter that makes them token by token (a smaller model, EAGLE-3,
        MTP). Others have their block size in their checkpoint.
    prompt_lookup: with a trained drafter, take what the text itself says instead of a block wherever its end occurred
        before (4 tokens or more); builtin drafters leave it aside.
    draft_tree: most drafts of a tree, 0 = chains alone. A trained drafter then gives second and third choices beside
        the likeliest token in steps that are greedy throughout; sampled requests get chains. Executors native, torch.
    drafter_dtype: of a trained drafter's weights. Verification is lossless whatever a drafter computes in, so it may be
        narrower than the target: `auto` is int8 with the native executor, else the
        target's. Engines hold their drafter as they were built: `auto`.
    executor: `auto` (the fastest of native and torch that runs here), `native`, `torch`; or what runs the folder
        that `engine` names: `tensorrt` (plans, on a GPU), `onnxruntime` (the exported graphs on the CPU, slowly: for
        checking an export); or `tensorrt_llm`, TensorRT-LLM's own engine on several GPUs.
    engine: folder of `dspark-build engine` (tensorrt) or `dspark-build export` (onnxruntime), made of this target and
        drafter; for tensorrt_llm a YAML file of its LLM arguments (parallelism).
    device: `cpu`, `cuda` (the first GPU) or `cuda:N`, for the executors torch and tensorrt; `auto` = the first GPU for
        tensorrt, the CPU for the others. tensorrt_llm takes what CUDA_VISIBLE_DEVICES leaves.
    policy: how many drafts are verified: `auto`, `none`, `fixed:K`, `threshold:P`, `prefix`, `lagged`; on a GPU that
        lays out its passes `auto` is `lagged`.
    capacity: what a step costs: a file of `dspark-build profile`, `auto` (capacity.json beside model.yaml where it
        is of this set-up, else measured once, in seconds, and kept), or `none` (learnt while serving).
    calibration: temperatures of the confidences: a file of `dspark-build calibrate`, `auto` (calibration.json in
        the drafter's folder, where there is one), or `none`.
    learned_calibration: what was learnt while serving, read at the start and written at the end: a file, `auto`
        (in the state folder, one for each drafter), or `none` (learn anew every time).
    record: folder where served answers are kept to retrain the drafter (`dspark-build retrain`), or `none`. They are
        the token ids of prompts and answers: what users wrote and what they were told.
    record_bytes: most that all files of that folder take; the oldest go first.
    rule: how sampled drafts are judged: `block` (block verification), `rejection` (token by token), `coupled`, or
        `auto` (coupled for requests that name a seed, block for the others).
    max_context_len: 0 = the model's own.
    max_step_tokens: prompt tokens computed in one step beside the decoding rows.
    num_threads: 0 = one per core.
    pin_threads: bind each worker thread of the native executor to a processor of its own, on machines that run
        nothing else.
    touch_cache: take the memory of the native target's cache from the system at the start, so that no answer waits for
        it: in a virtual machine the first touch of 2 MB takes milliseconds. Else it is taken as it fills.
    max_request_ms: milliseconds from arrival after which every request ends with what there is of its answer; 0 = no
        limit. It bounds what is computed for clients that have left without Triton noticing.
    """

    target: str = ""
    drafter: str = "auto"
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    prompt_lookup: bool = False
    draft_tree: int = 0
    dtype: str = "auto"
    drafter_dtype: str = "auto"
    executor: str = "auto"
    engine: str = ""
    device: str = "auto"
    policy: str = "auto"
    rule: SampledRule = "auto"
    capacity: str = "auto"
    calibration: str = "auto"
    learned_calibration: str = "none"
    record: str = "none"
    record_bytes: int = 1 << 30
    max_batch_size: int = 64
    max_context_len: int = 0
    max_step_tokens: int = 256
    page_size: int = 16
    cache_bytes: int = 1 << 30
    num_threads: int = 0
    pin_threads: bool = False
    touch_cache: bool = False
    max_queue_size: int = 1024
    max_request_ms: int = 600_000


def drafter_dtype(wanted: str, *, executor: str, target_dtype: str) -> str:
    """Return the type that a trained drafter's weights get; only `auto` is resolved.

    With native code it is int8: half the time of bfloat16, and no shorter accepted drafts (docs/benchmarks.md).
    """
    if wanted != "auto":
        return wanted
    return "int8" if executor == "native" else target_dtype


def parse_bytes(value: object) -> int:
    """Return a number of bytes from an integer or a text such as `512MiB` or `2 GB`.

    Raises:
        ValueError: for anything else.
    """
    number: float
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE)
        if match is None:
            raise ValueError("a number of bytes such as 1073741824, 512MiB or 2GB")
        base = 1024 if match[3] else 1000
        number = float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")
    if number >= 2**63:
        raise ValueError("a number of bytes below 8 EiB")
    return int(number)


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        allowed = f"a whole number from {low} to {high}"
        try:
            number = int(str(value))
        except ValueError:
            raise ValueError(allowed) from None
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError(allowed)
        return number

    return parse


def _one_of(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty text")
    return value


def _device(value: object) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(value)) is None:
        raise ValueError("auto, cpu, cuda, cuda:N")
    return str(value)


def _policy(value: object) -> str:
    text = str(value)
    try:
        parse_policy(text, block_size=1)
    except ConfigError:
        raise ValueError(f"{POLICIES} (K a whole number >= 0, P a number in [0, 1])") from None
    return text


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() in ("true", "false"):
        return str(value).strip().lower() == "true"
    raise ValueError("true, false")


def _cache_bytes(value: object) -> int:
    number = parse_bytes(value)
    if number < 1:
        raise ValueError("at least 1 byte")
    return number


def _record_bytes(value: object) -> int:
    number = parse_bytes(value)
    if number < LEAST_RECORD_BYTES:
        raise ValueError(f"at least {LEAST_RECORD_BYTES} bytes (16MiB)")
    return number


_PARSERS: dict[str, Callable[[object], object]] = {
    "target": _text,
    "drafter": _text,
    "num_draft_tokens": _whole(1, 64),
    "prompt_lookup": _boolean,
    "draft_tree": _whole(0, 64),
    "dtype": _one_of(*DTYPES),
    "drafter_dtype": _one_of(*DTYPES),
    "executor": _one_of(*EXECUTORS),
    "engine": _text,
    "device": _device,
    "policy": _policy,
    "rule": _one_of(*RULES),
    "capacity": _text,
    "calibration": _text,
    "learned_calibration": _text,
    "record": _text,
    "record_bytes": _record_bytes,
    "max_batch_size": _whole(1, 4096),
    "max_context_len": _whole(0, 1 << 24),
    "max_step_tokens": _whole(1, 1 << 20),
    "page_size": _whole(1, 4096),
    "cache_bytes": _cache_bytes,
    "num_threads": _whole(0, 4096),
    "pin_threads": _boolean,
    "touch_cache": _boolean,
    "max_queue_size": _whole(1, 1 << 20),
    "max_request_ms": _whole(0, 2**31 - 1),
}
assert set(_PARSERS) == {f.name for f in fields(ServeConfig)}


def load_serve_config(
    path: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> ServeConfig:
    """Read settings; later sources win: file, `DSPARK_<NAME>` variables, overrides (None = not given).

    Raises:
        ConfigError: listing every problem of every source.
    """
    values, problems = read_settings(path, overrides, environ=environ)
    if problems:
        raise ConfigError("\n".join(problems))
    return ServeConfig(**values)  # type: ignore[arg-type]  # each value went through its own parser


def read_settings(
    path: Path | None,
    overrides: Mapping[str, object] | None,
    *,
    environ: Mapping[str, str],
) -> tuple[dict[str, object], list[str]]:
    """Return what can be read of the settings, and every problem of every source. Arguments as `load_serve_config`."""
    sources: list[tuple[str, Mapping[str, object]]] = []
    problems: list[str] = []
    if path is not None:
        try:
            sources.append((str(path), _read_yaml(path)))
        except ConfigError as error:
            problems.append(str(error))
    variables = {
        name: environ[f"DSPARK_{name.upper()}"] for name in _PARSERS if environ.get(f"DSPARK_{name.upper()}")
    }
    sources.append(("environment", variables))
    sources.append(("options", {k: v for k, v in (overrides or {}).items() if v is not None}))
    values: dict[str, object] = {}
    for origin, given in sources:
        for name, value in given.items():
            if name not in _PARSERS:
                problems.append(f"{origin}: unknown setting {name!r}, allowed are {', '.join(_PARSERS)}")
                continue
            try:
                values[name] = _PARSERS[name](value)
            except ValueError as error:
                problems.append(f"{origin}: {name}: got {value!r}, allowed is {error}")
    unread = path is not None and str(path) not in (origin for origin, _ in sources)  # it may name the target
    if not values.get("target") and not unread and not any(": target:" in problem for problem in problems):
        problems.append("target: not given, allowed is a Hugging Face folder, a .gguf file or a hub name")
    return values, problems


def _read_yaml(path: Path) -> Mapping[str, object]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got a {type(content).__name__}, allowed is a mapping of settings")
    # `target: ${DSPARK_TARGET}`-style indirection is not needed: the environment wins anyway.
    return {str(key): value for key, value in content.items() if value is not None}
