"""Which device an executor runs on: the settings `executor` and `device` together. Knows neither torch nor CUDA."""

from __future__ import annotations

from dspark.errors import ConfigError

__all__ = ["chosen_device", "gpu_number"]

_ON_GPUS = ("torch", "tensorrt")


def chosen_device(executor: str, device: str) -> str:
    """Return `cpu` or `cuda:N`.

    Arguments:
        executor: the setting; `auto` with a GPU means torch.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: the executor does not run there.
    """
    if device == "auto":
        return "cuda:0" if executor == "tensorrt" else "cpu"
    if executor == "tensorrt_llm":
        raise ConfigError(
            f"device: got {device!r}, allowed with executor tensorrt_llm is auto; CUDA_VISIBLE_DEVICES chooses its GPUs"
        )
    if device == "cpu":
        if executor == "tensorrt":
            raise ConfigError("device: got 'cpu', allowed with executor tensorrt is auto, cuda, cuda:N")
        return device
    if executor not in (*_ON_GPUS, "auto"):
        raise ConfigError(
            f"device: got {device!r}, allowed with executor {executor} is auto, cpu; GPUs are for "
            f"{', '.join(_ON_GPUS)}"
        )
    return f"cuda:{gpu_number(device)}"


def gpu_number(device: str) -> int:
    """Return N of `cuda` (0) or `cuda:N`."""
    return int(device.partition(":")[2] or 0)
