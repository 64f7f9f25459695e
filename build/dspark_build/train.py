"""`dspark-build train`: AdamW over packed batches, checkpoints that go on bit for bit, a drafter at every
checkpoint.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import ConfigError, NonFiniteError
from dspark.models.config import DecoderConfig, DrafterConfig
from dspark.models.loading import TargetCheckpoint, load_target
from torch import Tensor

from dspark_build.curves import Curves
from dspark_build.drafter_init import choose_draft_vocab, export_drafter, initialise
from dspark_build.drafting_loss import LossWeights
from dspark_build.feature_cache import stored_layers
from dspark_build.greedy_confidence import MIN_BLOCKS, GreedyFit, fit_greedy_confidence
from dspark_build.optimizer import MatrixOptimizer
from dspark_build.progress import ProgressLine, StopSignal, say
from dspark_build.training_batch import PackedBatch, choose_anchors, pack
from dspark_build.training_data import Dataset, target_head
from dspark_build.training_model import BatchResult, DrafterModel, FrozenTarget
from dspark_build.training_state import Counters, Ema, TrainSettings, load_state, save_state

__all__ = ["Acceptance", "Trainer", "add_train_arguments", "run_train"]

Array = npt.NDArray[np.float64]

STATE_NAME = "state.pt"


class Acceptance:
    """Sums of what was accepted at each position, teacher-forced."""

    def __init__(self, block_size: int, *, whole_blocks: bool) -> None:
        """Count; `whole_blocks` when every slot is scored, so that survival can be followed along a block."""
        self.block_size = block_size
        self.whole_blocks = whole_blocks
        self.num = np.zeros(block_size)
        self.accepted = np.zeros(block_size)  # sum of 1 - TV
        self.greedy = np.zeros(block_size)  # arg-max of q is arg-max of p
        self.survival = np.zeros(block_size)  # sum over whole blocks of the product up to k
        self.greedy_survival = np.zeros(block_size)
        self.num_blocks = 0
        self.loss = 0.0
        self.num_losses = 0

    def add(self, result: BatchResult, batch: PackedBatch, draft_to_target: Tensor) -> None:
        """Take in one batch; survival is counted over blocks all of whose slots are there."""
        G = self.block_size
        position = (result.slot % G).cpu().numpy()
        rate = result.stats.acceptance.clamp(0, 1).cpu().numpy()
        self.num += np.bincount(position, minlength=G)
        self.accepted += np.bincount(position, weights=rate, minlength=G)
        self.loss += float(result.loss.detach())
        self.num_losses += 1
        if not self.whole_blocks:
            return
        full = np.zeros(batch.num_blocks * G)
        seen = np.zeros(batch.num_blocks * G, np.bool_)
        at = result.slot.cpu().numpy()
        full[at], seen[at] = rate, True
        whole = seen.reshape(-1, G).all(axis=1)
        self.num_blocks += int(whole.sum())
        self.survival += np.cumprod(full.reshape(-1, G)[whole], axis=1).sum(axis=0)
        if result.stats.greedy is not None:
            rows = batch.target_row.reshape(-1)[result.slot]
            hit = (draft_to_target[result.stats.greedy] == batch.target_argmax[rows]).cpu().numpy()
            self.greedy += np.bincount(position, weights=hit, minlength=G)
            full[at] = hit
            self.greedy_survival += np.cumprod(full.reshape(-1, G)[whole], axis=1).sum(axis=0)

    @property
    def rates(self) -> Array:
        """Mean 1 - TV at each position [G]."""
        return np.asarray(self.accepted / np.maximum(self.num, 1))

    @property
    def accepted_len(self) -> float:
        """Expected accepted length with the added token; from the means where slots were sampled."""
        if self.num_blocks:
            return 1.0 + float(self.survival.sum()) / self.num_blocks
        return 1.0 + float(np.cumprod(self.rates).sum())

    @property
    def greedy_len(self) -> float:
        return 1.0 + float(self.greedy_survival.sum()) / max(self.num_blocks, 1)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.num_losses, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Where a run is in its schedule."""

    progress: float  # 0 to 1
    lr: float
    kl: float


class Trainer:
    """One run. Batches are a pure function of seed and step, so a resumed run meets the same ones.

    Arguments:
        model: initialised.
        data: examples.
        out: folder of state, curves and drafter.
    """

    def __init__(self, model: DrafterModel, data: Dataset, settings: TrainSettings, *, out: Path) -> None:
        self.model, self.data, self.settings, self.out = model, data, settings, out
        self.counters = Counters()
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        if settings.confidence_only:
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(name.startswith("confidence_head."))
        self.device = model.frozen.embedding.device
        self.optimizer = MatrixOptimizer(
            _groups(self.parameters, settings),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            round_dtype=model.compute_dtype,
        )
        self.ema = Ema(self.parameters, settings.ema) if settings.ema else None
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    # -- state ---------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Take up the state in the output folder; False when there is none."""
        path = self.out / STATE_NAME
        if not path.exists():
            return False
        state = load_state(path, settings=self.settings, device=self.device)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.mean = state["ema"]
        self.counters = Counters(**state["counters"])
        return True

    def save(self) -> None:
        """Write the state and the drafter as it stands."""
        save_state(
            self.out / STATE_NAME,
            settings=self.settings,
            counters=self.counters,
            parameters=self.parameters,
            optimizer=self.optimizer,
            ema=self.ema,
            draft_to_target=self.model.frozen.draft_to_target,
        )
        export_drafter(self.out / "drafter", self.model, self.served_parameters)

    @property
    def served_parameters(self) -> dict[str, Tensor]:
        """The parameters that are exported: the running mean where there is one."""
        return self.parameters if self.ema is None else self.ema.mean

    # -- the loop ------------------------------------------------------------------------------------------

    def step(self, seen: Acceptance) -> Tensor:
        """Take one optimizer step; return its loss.

        Raises:
            NonFiniteError: the loss or its gradient is not finite; nothing was changed.
        """
        settings = self.settings
        started = time.monotonic()
        pace = self.pace()
        for group in self.optimizer.param_groups:
            group["lr"] = pace.lr
        weights = self._weights(kl=pace.kl)
        total = torch.zeros((), device=self.device)
        positions = 0
        for micro in range(settings.accumulate):
            batch, keep = self.batch(self.counters.step * settings.accumulate + micro)
            result = self.model.loss(batch, weights, keep=keep)
            (result.loss / settings.accumulate).backward()
            total += result.loss.detach() / settings.accumulate
            positions += int(batch.valid.sum())
            seen.add(result, batch, self.model.frozen.draft_to_target)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.clip)
        if not bool(torch.isfinite(total)) or not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                f"training: the loss at step {self.counters.step + 1} is {float(total):g} with gradient norm "
                f"{float(norm):g}; the last checkpoint is kept: lower --lr, or look at the data"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.counters.step += 1
        self.counters.positions += positions
        if self.ema is not None:
            self.ema.update(self.parameters, self.counters.step)
        self.counters.elapsed_s += time.monotonic() - started
        return total

    def new_acceptance(self) -> Acceptance:
        """Return an empty count for training batches."""
        return Acceptance(self.settings.block_size, whole_blocks=not self.settings.sample_slots)

    def pace(self) -> _Pace:
        """Return learning rate and weights: linear warm-up, then half a cosine down to `min_lr_share`."""
        s, c = self.settings, self.counters
        progress = c.positions / s.positions
        if s.max_minutes:
            progress = max(progress, c.elapsed_s / 60.0 / s.max_minutes)
        if progress < s.warmup_share:
            share = (progress + 1e-3) / (s.warmup_share + 1e-3)
        else:
            past = min((progress - s.warmup_share) / (1.0 - s.warmup_share), 1.0)
            share = s.min_lr_share + (1.0 - s.min_lr_share) * 0.5 * (1.0 + math.cos(math.pi * past))
        return _Pace(progress=progress, lr=s.lr * share, kl=s.kl if progress < s.kl_until else 0.0)

    def batch(self, index: int) -> tuple[PackedBatch, Tensor | None]:
        """Return micro-batch number `index` and, when slots are sampled, the share at which each was kept."""
        settings = self.settings
        rng = np.random.default_rng((settings.seed, 1, index))
        examples, anchors = [], []
        for at in range(index * settings.sequences, (index + 1) * settings.sequences):
            example = self.data.example(self._key(at))
            examples.append(example)
            anchors.append(
                choose_anchors(
                    rng,
                    prompt_len=example.prompt_len,
                    num_tokens=len(example.tokens),
                    num_anchors=settings.anchors,
                )
            )
        batch = pack(examples, anchors, block_size=settings.block_size).to(self.device)
        keep = None
        if settings.sample_slots:
            share = np.exp(-np.arange(settings.block_size) / settings.decay)
            drawn = rng.random(tuple(batch.valid.shape)) < share
            keep = torch.from_numpy((drawn * share).astype(np.float32)).to(self.device)
        return batch, keep

    def _key(self, at: int) -> tuple[int, int]:
        num = len(self.data.train)
        epoch, place = divmod(at, num)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self.settings.seed, 0, epoch)).permutation(num))
        return self.data.train[int(self._order[1][place])]

    def _weights(self, *, kl: float) -> LossWeights:
        s = self.settings
        return LossWeights(ce=s.ce, tv=s.tv, kl=kl, confidence=s.confidence_weight, decay=s.decay)

    @contextmanager
    def _served(self) -> Iterator[None]:
        """Put the served parameters in place of those that learn, and these back at the end."""
        live = {name: value.detach().clone() for name, value in self.parameters.items()} if self.ema else {}
        with torch.no_grad():
            for name in live:
                self.parameters[name].copy_(self.served_parameters[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in live.items():
                    self.parameters[name].copy_(value)

    def rate_greedy(self) -> GreedyFit | None:
        """Fit what arg-max drafts are worth and write it to the drafter; None with too few greedy answers."""
        with self._served():
            fit = fit_greedy_confidence(self.model, self.data, sequences=self.settings.sequences)
        if fit is not None:
            export_drafter(
                self.out / "drafter", self.model, self.served_parameters, greedy_confidence=fit.weights
            )
        return fit

    @torch.no_grad()
    def held_out(self, *, max_sequences: int = 48) -> Acceptance:
        """Measure the served parameters on held-out prompts: every fourth answer token is an anchor."""
        with self._served():
            return self._held_out(max_sequences)

    def _held_out(self, max_sequences: int) -> Acceptance:
        seen = Acceptance(self.settings.block_size, whole_blocks=True)
        keys = self.data.held_out[:max_sequences]
        for first in range(0, len(keys), self.settings.sequences):
            examples = [self.data.example(key) for key in keys[first : first + self.settings.sequences]]
            anchors = [np.arange(e.prompt_len, len(e.tokens) - 1, 4, dtype=np.int64) for e in examples]
            batch = pack(examples, anchors, block_size=self.settings.block_size).to(self.device)
            result = self.model.loss(batch, self._weights(kl=0.0), want_greedy=True)
            seen.add(result, batch, self.model.frozen.draft_to_target)
        return seen


def _groups(parameters: dict[str, Tensor], settings: TrainSettings) -> list[dict[str, Any]]:
    """Return the optimizer's groups: layer matrices, other matrices, and what no decay shrinks."""

    def kind(name: str, parameter: Tensor) -> str:
        if (
            parameter.dim() == 2
            and min(parameter.shape) > 1
            and (name.startswith("layers.") or name == "fc.weight")
        ):
            return "layer"
        return "matrix" if parameter.dim() == 2 and "markov_w1" not in name else "other"

    kinds = {name: kind(name, parameter) for name, parameter in parameters.items()}

    def of(wanted: str) -> list[Tensor]:
        return [p for name, p in parameters.items() if kinds[name] == wanted and p.requires_grad]

    return [
        group
        for group in (
            {"params": of("layer"), "orthogonal": settings.optimizer == "muon"},
            {"params": of("matrix")},
            {"params": of("other"), "weight_decay": 0.0},
        )
        if group["params"]
    ]


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="folder, .gguf file or hub name")
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        nargs="+",
        metavar="DATA",
        help="folders made by `dspark-build data`",
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="state, curves and drafter/; the same command resumes"
    )
    parser.add_argument("--restart", action="store_true", help="forget the run in --out")
    model = parser.add_argument_group("drafter")
    model.add_argument("--layers", type=int, default=2, help="decoder layers (default %(default)s)")
    model.add_argument("--intermediate-size", type=int, default=0, help="0 = the target's")
    model.add_argument("--block-size", type=int, default=7, help="G (default %(default)s)")
    model.add_argument(
        "--target-layers", help="feature layers, e.g. 7,14,22,29 (default: all that --data has)"
    )
    model.add_argument(
        "--mask-token", type=int, default=0, help="id whose embedding marks an open slot (%(default)s)"
    )
    model.add_argument("--head", choices=("vanilla", "gated", "rnn", "none"), default="vanilla")
    model.add_argument("--rank", type=int, default=128, help="of the sequential head (default %(default)s)")
    model.add_argument("--no-confidence", action="store_true", help="train without a confidence head")
    model.add_argument("--confidence-without-markov", action="store_true")
    model.add_argument(
        "--confidence-only",
        action="store_true",
        help="with --init DRAFTER: fit its confidence head alone, on answers that the rest never saw; on those it was "
        "trained with a drafter looks better than it is. Greedy answers also tell what an arg-max draft's own "
        "probability says",
    )
    model.add_argument(
        "--draft-vocab", type=int, default=12288, help="tokens it can propose; 0 = all (%(default)s)"
    )
    model.add_argument(
        "--vocab-from", type=Path, metavar="DRAFTER", help="take over another drafter's vocabulary"
    )
    model.add_argument(
        "--init", default="random", help="random, layers:A,B or a drafter folder (default %(default)s)"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--positions", type=float, default=20e6, help="slots to train on; ends the schedule (%(default)g)"
    )
    run.add_argument("--max-minutes", type=float, default=0.0, help="end the schedule after this, 0 = never")
    run.add_argument("--sequences", type=int, default=8, help="of a micro-batch (default %(default)s)")
    run.add_argument("--anchors", type=int, default=48, help="blocks of each sequence (default %(default)s)")
    run.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches of a step (default %(default)s)"
    )
    run.add_argument(
        "--all-slots", action="store_true", help="score every slot; default: slot k in exp(-(k-1)/decay)"
    )
    run.add_argument(
        "--optimizer",
        choices=("muon", "adamw"),
        default="muon",
        help="muon: orthogonalised momentum for the layers' matrices, AdamW for the rest (default %(default)s)",
    )
    run.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (default %(default)g)")
    run.add_argument("--min-lr-share", type=float, default=0.02)
    run.add_argument("--warmup-share", type=float, default=0.03)
    run.add_argument("--weight-decay", type=float, default=0.01)
    run.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (default %(default)g)")
    run.add_argument(
        "--ema", type=float, default=0.0, help="decay of the running mean that is exported, 0 = none"
    )
    run.add_argument("--ce-weight", type=float, default=0.1, help="true token (default %(default)g)")
    run.add_argument("--tv-weight", type=float, default=0.9, help="||q - p||_1 (default %(default)g)")
    run.add_argument(
        "--kl-weight", type=float, default=0.0, help="cross-entropy with p (default %(default)g)"
    )
    run.add_argument(
        "--kl-until", type=float, default=1.0, help="share of the run with it (default %(default)g)"
    )
    run.add_argument("--confidence-weight", type=float, default=1.0)
    run.add_argument("--decay", type=float, default=4.0, help="w_k = exp(-(k-1)/decay) (default %(default)g)")
    run.add_argument(
        "--checkpoint-minutes", type=float, default=5.0, help="between checkpoints (default %(default)g)"
    )
    run.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of matrix products"
    )
    run.add_argument("--device", default="cpu", help="cpu or cuda")
    run.add_argument("--threads", type=int, default=0, help="0 = one per core")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--repeat-hot",
        type=int,
        default=1,
        metavar="N",
        help="take answers of temperature 0.9 and above N times as often as others: drafts of sampled answers gain "
        "(default %(default)s)",
    )


def run_train(args: argparse.Namespace) -> int:
    """Train, or go on with, one drafter.

    Raises:
        ConfigError, CheckpointError: options or files that do not fit together.
        CapacityError: the disk is full; the last checkpoint is kept.
        NonFiniteError: the loss is not finite; the last checkpoint is kept.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    trainer = build_trainer(args)
    if args.restart:
        (args.out / STATE_NAME).unlink(missing_ok=True)
    if trainer.resume():
        say(
            f"train: going on from step {trainer.counters.step}, "
            f"{trainer.counters.positions / 1e6:.2f} M positions"
        )
    with StopSignal() as stop:
        train(trainer, should_stop=stop, checkpoint_s=args.checkpoint_minutes * 60.0)
    return 0


def train(trainer: Trainer, *, should_stop: StopSignal, checkpoint_s: float) -> None:
    """Run the loop to the end of the schedule or until asked to stop; what was learned is saved either
    way.
    """
    curves = Curves(trainer.out / "curves.csv", step=trainer.counters.step)
    line = ProgressLine()
    seen = trainer.new_acceptance()
    last_save = time.monotonic()
    try:
        while trainer.pace().progress < 1.0:
            before_s, before = trainer.counters.elapsed_s, trainer.counters.positions
            trainer.step(seen)
            speed = (trainer.counters.positions - before) / max(trainer.counters.elapsed_s - before_s, 1e-9)
            line.show(trainer.pace().progress, _status(trainer, seen, speed))
            if should_stop():
                break
            if time.monotonic() - last_save >= checkpoint_s:
                _checkpoint(trainer, curves, seen)
                seen = trainer.new_acceptance()
                last_save = time.monotonic()
    finally:
        line.close()
    _checkpoint(trainer, curves, seen)
    if trainer.settings.confidence_only and not should_stop():
        _rate_greedy(trainer)
    ended = "stopped by a signal; the same command goes on" if should_stop() else "finished"
    say(f"train: {ended}; drafter in {trainer.out / 'drafter'}")


def _checkpoint(trainer: Trainer, curves: Curves, seen: Acceptance) -> None:
    row: dict[str, float] = {
        "step": trainer.counters.step,
        "positions": trainer.counters.positions,
        "seconds": trainer.counters.elapsed_s,
        "lr": trainer.pace().lr,
    }
    if seen.num_losses:
        row |= {"loss": seen.mean_loss, "accepted_len": seen.accepted_len}
    row |= {f"acceptance_{k + 1}": float(rate) for k, rate in enumerate(seen.rates)}
    if trainer.data.held_out:
        held_out = trainer.held_out()
        row |= {
            "held_out_loss": held_out.mean_loss,
            "held_out_accepted_len": held_out.accepted_len,
            "held_out_greedy_len": held_out.greedy_len,
        }
        greedy = held_out.greedy / np.maximum(held_out.num, 1)
        say(
            f"held out: loss {held_out.mean_loss:.3f}, accepted length {held_out.accepted_len:.3f}, greedy "
            f"{held_out.greedy_len:.3f}; acceptance {_numbers(held_out.rates)}, greedy {_numbers(greedy)}"
        )
    trainer.save()
    curves.add(row)
    curves.save()


def _rate_greedy(trainer: Trainer) -> None:
    fit = trainer.rate_greedy()
    if fit is None:
        say(
            f"greedy confidence: left out, --data has fewer than {MIN_BLOCKS} blocks of answers at temperature 0"
        )
        return
    say(
        f"greedy confidence: {fit.num_blocks} blocks; AUC of the first position "
        f"{fit.auc_before:.3f} -> {fit.auc_after:.3f} on answers it was not fitted to"
    )


def _status(trainer: Trainer, seen: Acceptance, speed: float) -> str:
    settings, counters, pace = trainer.settings, trainer.counters, trainer.pace()
    left_s = (settings.positions - counters.positions) / max(speed, 1e-9)
    if pace.progress > 0 and settings.max_minutes:
        left_s = min(left_s, settings.max_minutes * 60.0 - counters.elapsed_s)
    return (
        f"step {counters.step} loss {seen.mean_loss:.3f} accepted "
        f"{seen.accepted_len:.2f} [{_numbers(seen.rates)}] "
        f"lr {pace.lr:.1e} {speed:.0f} pos/s, {max(left_s, 0) / 60:.0f} min left"
    )


def _numbers(values: Array) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def build_trainer(args: argparse.Namespace) -> Trainer:
    """Open target and data and make the trainer that the options describe; nothing is resumed yet."""
    checkpoint = load_target(args.target)
    device = _device(args.device)
    dtype = _dtype(args.dtype, device)
    head = target_head(checkpoint, dtype=dtype)
    layer_ids = _layer_ids(args)
    data = Dataset(
        args.data, target=checkpoint.config, layer_ids=layer_ids, head=head, repeat_hot=args.repeat_hot
    )
    vocab = _draft_vocab(args, checkpoint, data)
    config = _drafter_config(args, checkpoint, layer_ids, len(vocab))
    weights = checkpoint.weights
    embedding = weights.float32("embed_tokens.weight")
    tied = checkpoint.config.tie_word_embeddings
    frozen = FrozenTarget.build(
        embedding=embedding,
        head=embedding if tied else weights.float32("lm_head.weight"),
        draft_to_target=vocab,
        dtype=dtype,
        device=device,
    )
    model = DrafterModel(config, frozen, compute_dtype=dtype)
    initialise(model, checkpoint, init=args.init, seed=args.seed)
    model.to(device)
    settings = _settings(args, config, data, dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    counts = data.token_counts(config.vocab_size)
    covered = counts[vocab].sum() / max(counts.sum(), 1)
    say(
        f"train: {num_parameters / 1e6:.1f} M parameters, {len(set(data.train))} "
        f"answers with {data.num_answer_tokens} tokens, "
        f"{len(data.held_out)} held out; the draft vocabulary of {len(vocab)} covers {covered:.2%}"
    )
    return Trainer(model, data, settings, out=args.out)


def _drafter_config(
    args: argparse.Namespace, checkpoint: TargetCheckpoint, layer_ids: tuple[int, ...], draft_vocab_size: int
) -> DrafterConfig:
    target = checkpoint.config
    for name, low in (("layers", 1), ("block_size", 1), ("sequences", 1), ("anchors", 1), ("accumulate", 1)):
        value = getattr(args, name)
        if value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, allowed is a whole number >= {low}")
    if not 0 <= args.mask_token < target.vocab_size:
        raise ConfigError(f"--mask-token: got {args.mask_token}, allowed is 0 to {target.vocab_size - 1}")
    if args.head != "none" and args.rank < 1:
        raise ConfigError(f"--rank: got {args.rank}, allowed is a whole number >= 1 (or --head none)")
    decoder = target.decoder
    return DrafterConfig(
        decoder=DecoderConfig(
            hidden_size=decoder.hidden_size,
            intermediate_size=args.intermediate_size or decoder.intermediate_size,
            num_layers=args.layers,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            rms_norm_eps=decoder.rms_norm_eps,
            qk_norm=decoder.qk_norm,
            rope=decoder.rope,
        ),
        vocab_size=target.vocab_size,
        block_size=args.block_size,
        target_layer_ids=layer_ids,
        mask_token_id=args.mask_token,
        markov_rank=0 if args.head == "none" else args.rank,
        markov_head_type="vanilla" if args.head == "none" else args.head,
        enable_confidence_head=not args.no_confidence,
        confidence_head_with_markov=not args.confidence_without_markov and args.head != "none",
        draft_vocab_size=draft_vocab_size,
        target_hash=target.model_hash,
    )


def _settings(
    args: argparse.Namespace, config: DrafterConfig, data: Dataset, dtype: torch.dtype
) -> TrainSettings:
    if args.confidence_only and (args.no_confidence or args.init == "random"):
        raise ConfigError(
            "--confidence-only: got no drafter with a confidence head, allowed is --init DRAFTER"
        )
    if args.positions < 1 or args.max_minutes < 0 or not args.lr > 0:
        raise ConfigError("--positions must be at least 1, --max-minutes at least 0 and --lr above 0")
    return TrainSettings(
        target_hash=config.target_hash or "",
        data_hash=data.content_hash,
        num_layers=config.decoder.num_layers,
        intermediate_size=config.decoder.intermediate_size,
        block_size=config.block_size,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        confidence=config.enable_confidence_head,
        confidence_with_markov=config.confidence_head_with_markov,
        confidence_only=args.confidence_only,
        draft_vocab_size=config.draft_vocab_size,
        init=args.init,
        sequences=args.sequences,
        anchors=args.anchors,
        accumulate=args.accumulate,
        sample_slots=not args.all_slots,
        positions=int(args.positions),
        max_minutes=args.max_minutes,
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr_share=args.min_lr_share,
        warmup_share=args.warmup_share,
        weight_decay=args.weight_decay,
        clip=args.clip,
        ema=args.ema,
        ce=args.ce_weight,
        tv=args.tv_weight,
        kl=args.kl_weight,
        kl_until=args.kl_until,
        confidence_weight=args.confidence_weight,
        decay=args.decay,
        dtype=str(dtype).removeprefix("torch."),
        seed=args.seed,
        repeat_hot=args.repeat_hot,
    )


def _layer_ids(args: argparse.Namespace) -> tuple[int, ...]:
    if args.target_layers is None:
        return stored_layers(args.data[0])[0]
    try:
        return tuple(int(part) for part in args.target_layers.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--target-layers: got {args.target_layers!r}, allowed are ids with commas"
        ) from error


def _draft_vocab(
    args: argparse.Namespace, checkpoint: TargetCheckpoint, data: Dataset
) -> npt.NDArray[np.int32]:
    size = args.draft_vocab or checkpoint.config.vocab_size
    if args.vocab_from is not None:
        found = load_drafter_checkpoint(args.vocab_from, target=checkpoint.config).draft_to_target
        if found is None:
            return np.arange(checkpoint.config.vocab_size, dtype=np.int32)
        return found
    tokenizer = checkpoint.tokenizer
    ends = {*checkpoint.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
    counts = data.token_counts(checkpoint.config.vocab_size)
    return choose_draft_vocab(
        counts, size=min(size, checkpoint.config.vocab_size), required=tuple(sorted(ends))
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device: got {name!r}, allowed are cpu and cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got 'cuda', but this machine has no CUDA device that torch can use")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        from dspark.executors.dtype import auto_dtype

        name = "bfloat16" if device.type == "cuda" else auto_dtype()
    return torch.bfloat16 if name == "bfloat16" else torch.float32
