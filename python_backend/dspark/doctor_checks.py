"""What `dspark doctor` looks at, as findings: nothing here loads weights, and nothing is changed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dspark.config import ENGINE_EXECUTORS, ServeConfig, drafter_dtype
from dspark.errors import DSparkError
from dspark.models.config import DecoderConfig, TargetConfig

if TYPE_CHECKING:
    from dspark.drafters.loading import DrafterOutline

__all__ = ["Finding", "machine_findings", "model_findings", "package_findings", "port_findings"]

_PACKAGES: Final = (
    "numpy",
    "torch",
    "tokenizers",
    "gguf",
    "llguidance",
    "tritonclient",
    "starlette",
    "tensorrt",
)
_LEAST_SHARED_BYTES: Final = 64 << 20  # Triton takes 1 MiB at first and grows with the largest request
_LEAST_FILES: Final = 1024
_MEMORY_SHARE: Final = 0.9  # of what is available that weights and caches may take
_ELEMENT_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `bad` ones keep a server from starting, or from serving well."""

    name: str
    text: str
    bad: bool = False


def package_findings() -> Iterator[Finding]:
    """Yield what is installed."""
    for package in _PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "not installed")


def machine_findings(*, shared: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Yield what the machine has, and whether a server finds what it needs."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", f"{platform.machine()}, {cores} cores, Python {platform.python_version()}")
    compiler = shutil.which("c++") or shutil.which("g++")
    yield Finding("C++ compiler", compiler or "none (the native executor needs its library built)")
    yield Finding("CUDA", _cuda())
    yield _server()
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        enough = free >= _LEAST_SHARED_BYTES
        advice = "" if enough else f"; at least {_mib(_LEAST_SHARED_BYTES)} are wanted (docker: --shm-size)"
        yield Finding("shared memory", f"{_mib(free)} free in {shared}{advice}", bad=not enough)
    else:
        yield Finding("shared memory", f"{shared} is not there; Triton's Python backend needs it", bad=True)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _LEAST_FILES
    yield Finding("open files", f"{soft} allowed" + (f"; {_LEAST_FILES} are wanted" if few else ""), bad=few)


def port_findings(host: str, ports: Mapping[str, int]) -> Iterator[Finding]:
    """Yield for each port whether a server could listen on it."""
    for name, port in ports.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                advice = f"is a server running? else dspark serve --{name}-port 0"
                yield Finding(
                    f"port {port}", f"{name}: taken on {host} ({error.strerror}); {advice}", bad=True
                )
            else:
                yield Finding(f"port {port}", f"{name}: free on {host}")


def model_findings(version_dir: Path) -> Iterator[Finding]:
    """Yield what the model in a repository would be served as.

    Arguments:
        version_dir: the folder of model.yaml.
    """
    from dspark.serving.checks import load_checked_config

    model_yaml = version_dir / "model.yaml"
    try:
        config = load_checked_config(model_yaml if model_yaml.is_file() else None, {}, base=version_dir)
    except DSparkError as error:
        for problem in str(error).splitlines():
            yield Finding("settings", problem, bad=True)
        return
    yield Finding("settings", f"{model_yaml}: good")
    from dspark.models.loading import load_target

    try:
        target = load_target(config.target).config
    except DSparkError as error:
        yield Finding("target", str(error), bad=True)
        return
    yield Finding(
        "target",
        f"{config.target}: {target.architecture}, {target.decoder.num_layers} layers, context "
        f"{target.max_context_len}, {_num_weights(target) / 1e6:.0f} million weights",
    )
    executor, dtype, finding = _executor(config)
    yield finding
    drafter, finding = _drafter(config, target, base=version_dir)
    yield finding
    if dtype is not None:
        yield from _memory(config, target, drafter, executor=executor, dtype=dtype)


def _executor(config: ServeConfig) -> tuple[str, str | None, Finding]:
    """Return executor, type (None where it cannot run, or its engine decides) and why it is this one."""
    from dspark_plugins.native import native_available, native_unavailable_reason, preferred_dtype

    from dspark.executors.loading import choose_executor

    if config.executor in (*ENGINE_EXECUTORS, "tensorrt_llm"):
        text = f"{config.executor}, {config.engine} (asked for; what it was built for is checked when it is loaded)"
        return config.executor, None, Finding("executor", text)
    try:
        name = choose_executor(config.executor)
    except DSparkError as error:
        return config.executor, None, Finding("executor", str(error), bad=True)
    if name == "native":
        dtype = preferred_dtype() if config.dtype == "auto" else config.dtype
        why = "runs here and is the fastest" if config.executor == "auto" else "asked for"
    else:
        from dspark.executors.dtype import auto_dtype

        dtype = auto_dtype() if config.dtype == "auto" else config.dtype
        why = "asked for"
        if not native_available():
            why = f"native cannot run here: {native_unavailable_reason()}"
    return name, dtype, Finding("executor", f"{name}, {dtype} ({why})")


def _drafter(
    config: ServeConfig, target: TargetConfig, *, base: Path
) -> tuple[DrafterOutline | None, Finding]:
    """Return what is known of the drafter (None where it does not fit), and whether it fits the target."""
    from dspark.drafters.loading import peek_drafter
    from dspark.runtime import resolve_drafter

    spec = resolve_drafter(config.drafter, base=base, target_hash=target.model_hash)
    why = f" (of {config.drafter})" if spec != config.drafter else ""
    try:
        outline = peek_drafter(spec, target, num_draft_tokens=config.num_draft_tokens)
    except DSparkError as error:
        return None, Finding("drafter", f"{spec}{why} does not fit: {error}", bad=True)
    confidence = ", with confidence head" if outline.has_confidence else ""
    drafts = f"{outline.block_size} tokens a block{confidence}" if outline.block_size else "never drafts"
    return outline, Finding("drafter", f"{spec}{why}: fits the target, {drafts}; policy {config.policy}")


def _memory(
    config: ServeConfig, target: TargetConfig, drafter: DrafterOutline | None, *, executor: str, dtype: str
) -> Iterator[Finding]:
    """Yield the pages that the cache holds, and whether weights and caches fit into memory."""
    page_bytes = _page_bytes(target.decoder, config.page_size, executor=executor, dtype=dtype)
    if drafter is not None:
        page_bytes += _drafter_page_bytes(config, drafter, executor=executor, target_dtype=dtype)
    context = min(config.max_context_len or target.max_context_len, target.max_context_len)
    if config.max_context_len > target.max_context_len:
        allowed = f"allowed is at most the model's {target.max_context_len}"
        yield Finding("context", f"max_context_len: got {config.max_context_len}, {allowed}", bad=True)
    most = config.max_batch_size * -(-context // config.page_size)
    num_pages = min(config.cache_bytes // page_bytes, most)
    tokens = num_pages * config.page_size
    if num_pages == 0:
        allowed = f"allowed is at least {page_bytes}, one page"
        yield Finding("cache", f"cache_bytes: got {config.cache_bytes}, {allowed}", bad=True)
        return
    advice = "" if tokens >= context else "; longer requests are refused (cache_bytes)"
    yield Finding(
        "cache",
        f"{num_pages} pages of {config.page_size} tokens, {tokens / context:.1f} times the context of {context}"
        + advice,
    )
    needed = num_pages * page_bytes + int(_num_weights(target) * _ELEMENT_BYTES[dtype])
    available = _available_bytes()
    fits = needed <= _MEMORY_SHARE * available
    text = f"weights and caches take about {_mib(needed)}, available are {_mib(available)}"
    yield Finding("memory", text + ("" if fits else "; lower cache_bytes"), bad=not fits)


def _drafter_page_bytes(
    config: ServeConfig, drafter: DrafterOutline, *, executor: str, target_dtype: str
) -> int:
    """Return the bytes of one page of what a drafter caches; 0 for one without a cache."""
    decoder, size = drafter.decoder, config.page_size
    if decoder is None:
        return 0
    text = 4 * size + 16  # what is remembered of the text whose rows a page holds
    if drafter.kind in ("eagle3", "mtp"):  # in torch beside any target, with a hidden state in every slot
        dtype = target_dtype if config.drafter_dtype == "auto" else config.drafter_dtype
        if dtype == "int8":
            from dspark.executors.dtype import auto_dtype

            dtype = auto_dtype()
        hidden = size * decoder.hidden_size * (4 if dtype == "float32" else 2)
        return _page_bytes(decoder, size, executor="torch", dtype=dtype) + hidden + text
    dtype = drafter_dtype(config.drafter_dtype, executor=executor, target_dtype=target_dtype)
    page_bytes = _page_bytes(decoder, size, executor=executor, dtype=dtype)
    return page_bytes + text if drafter.kind == "draft_model" else page_bytes


def _page_bytes(decoder: DecoderConfig, page_size: int, *, executor: str, dtype: str) -> int:
    """Return the bytes of one page, keys and values of all layers; native code pads values to whole vectors."""
    value_dim = -(-decoder.head_dim // 16) * 16 if executor == "native" else decoder.head_dim
    element = 4 if dtype == "float32" else 2
    return decoder.num_layers * page_size * decoder.num_kv_heads * (decoder.head_dim + value_dim) * element


def _num_weights(target: TargetConfig) -> int:
    decoder = target.decoder
    attention = 2 * (decoder.num_heads + decoder.num_kv_heads) * decoder.head_dim * decoder.hidden_size
    layer = attention + 3 * decoder.hidden_size * decoder.intermediate_size
    tables = 1 if target.tie_word_embeddings else 2
    return decoder.num_layers * layer + tables * target.vocab_size * decoder.hidden_size


def _available_bytes() -> int:
    """Return the memory that can still be taken: the machine's, or what the container leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    available = fields["MemAvailable"]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such group, or "max": no limit
        pass
    return available


def _cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"


def _server() -> Finding:
    from dspark.serving.tritonserver import find_tritonserver

    try:
        return Finding("tritonserver", str(find_tritonserver().binary))
    except DSparkError as error:
        return Finding("tritonserver", str(error), bad=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
