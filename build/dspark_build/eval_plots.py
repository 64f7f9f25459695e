"""Pictures of an evaluation: acceptance by position, reliability, what a confidence threshold would do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from dspark.calibration.sts import ScaledFit, forecast_survival, reliability, survival_labels
from dspark.errors import ConfigError

from dspark_build.block_records import BlockRecords

__all__ = ["draw_all", "threshold_sweep"]

Array = npt.NDArray[np.float64]


def draw_all(folder: Path, records: BlockRecords, fit: ScaledFit | None) -> list[Path]:
    """Draw every picture that the records allow; return their paths.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            "--out needs matplotlib for the pictures: pip install matplotlib, or leave --out away"
        ) from error
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_draw_acceptance(folder / "acceptance_by_position.png", records)]
    if records.confidence_logits is not None:
        paths.append(_draw_reliability(folder / "reliability.png", records, fit))
        paths.append(_draw_sweep(folder / "threshold_sweep.png", records, fit))
    return paths


def threshold_sweep(records: BlockRecords, fit: ScaledFit | None, thresholds: Array) -> tuple[Array, Array]:
    """Return mean verified drafts and mean accepted length if drafts with survival below a threshold were
    cut.

    Each block is cut at the first position whose forecast survival is below the threshold; what the
    target accepted of the full block says what would have been accepted of the cut one.
    """
    assert records.confidence_logits is not None, "a sweep needs confidences"
    forecast = forecast_survival(records.confidence_logits, fit)  # falls along a block
    verified = (forecast[:, :, None] >= thresholds[None, None, :]).sum(axis=1)  # [N, thresholds]
    accepted = np.minimum(verified, records.accepted[:, None])
    return verified.mean(axis=0), 1.0 + accepted.mean(axis=0)


def _draw_acceptance(path: Path, records: BlockRecords) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    positions = np.arange(1, records.block_size + 1)
    sources = sorted(set(records.source.tolist()))
    for name in [*sources, "overall"]:
        part = records if name == "overall" else records.of(name)
        style = {"linewidth": 2.5, "color": "black"} if name == "overall" else {}
        label = f"{name} ({part.accepted_len:.2f})"
        axes[0].plot(positions, part.conditional(), marker="o", label=label, **style)
        axes[1].plot(positions, part.cumulative(), marker="o", label=label, **style)
    for axis, title in zip(axes, ("conditional acceptance", "cumulative acceptance"), strict=True):
        axis.set(title=title, xlabel="draft position", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(title="source (accepted length)", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_reliability(path: Path, records: BlockRecords, fit: ScaledFit | None) -> Path:
    import matplotlib.pyplot as plt

    assert records.confidence_logits is not None, "a reliability diagram needs confidences"
    labels, known = survival_labels(records.accepted, records.verify_len, records.block_size)
    figure, axes = plt.subplots(
        1, records.block_size, figsize=(2.6 * records.block_size, 3), constrained_layout=True, squeeze=False
    )
    forecasts = [("raw", forecast_survival(records.confidence_logits, None))]
    if fit is not None:
        forecasts.append(("calibrated", forecast_survival(records.confidence_logits, fit)))
    for k, axis in enumerate(axes[0]):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for name, forecast in forecasts:
            bins = reliability(forecast[known[:, k], k], labels[known[:, k], k])
            axis.plot(bins.forecast, bins.observed, marker="o", markersize=3, label=name)
        axis.set(title=f"position {k + 1}", xlim=(0, 1), ylim=(0, 1))
    axes[0][0].set(ylabel="observed survival", xlabel="forecast survival")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_sweep(path: Path, records: BlockRecords, fit: ScaledFit | None) -> Path:
    import matplotlib.pyplot as plt

    thresholds = np.linspace(0.0, 1.0, 101)
    verified, accepted_len = threshold_sweep(records, fit, thresholds)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    axes[0].plot(thresholds, accepted_len, label="accepted length")
    axes[0].plot(thresholds, 1.0 + verified, label="rows verified")
    axes[0].set(xlabel="least survival that is verified", title="confidence threshold")
    axes[1].plot(1.0 + verified, accepted_len)
    axes[1].set(xlabel="rows verified per step", ylabel="accepted length", title="what a row buys")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
