"""The tables of docs/kernels.md: how many programs fit on a multiprocessor, and the least time a launch can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.errors import ConfigError
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.kernels.sets import ModelShape
from dspark_plugins.kernels.signatures import SIGNATURES

from dspark_build.files import write_text

if TYPE_CHECKING:
    from dspark_build.kernels import KernelEntry

__all__ = ["Load", "loads_of", "write_tables"]

BEGIN = "<!-- tables: written by dspark-build kernels --docs -->"
END = "<!-- end of tables -->"

_SEQUENCES, _CONTEXT, _BLOCK, _RANK, _WIDTH = (
    16,
    2048,
    7,
    256,
    2,
)  # what the estimates are for; bytes of an element


@dataclass(frozen=True, slots=True)
class Load:
    """What one launch has to move and compute at least."""

    what: str
    num_bytes: float
    flops: float


def loads_of(shape: ModelShape) -> Iterator[Load]:
    """Yield the launches of one step: a layer of the target, a layer of the drafter, head, verification."""
    heads, kv_heads, dim, vocab = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size
    cached = _SEQUENCES * _CONTEXT * 2 * kv_heads * dim * _WIDTH
    for what, rows in (
        ("target, decoding", 1),
        ("target, verifying", 1 + _BLOCK),
        ("drafter's block", _BLOCK),
    ):
        own = (
            _SEQUENCES * rows * (2 * heads + 4 * kv_heads) * dim * _WIDTH
        )  # q, out, k and v read and written
        flops = 4.0 * _SEQUENCES * rows * (_CONTEXT + rows) * heads * dim
        yield Load(f"attention, {what}", cached + own, flops)
    chunk = 2048
    yield Load(
        f"attention, prompt of {chunk}",
        chunk * (2 * heads + 4 * kv_heads) * dim * _WIDTH,
        2.0 * chunk * chunk * heads * dim,
    )
    logits = _SEQUENCES * _BLOCK * vocab
    # W2 once a position; base logits in, q out in float32, written as logits first, then read and written as q.
    yield Load("block_sample", _BLOCK * vocab * _RANK * _WIDTH + logits * (_WIDTH + 12), 2.0 * logits * _RANK)
    rows = _SEQUENCES * (1 + _BLOCK)
    # Logits three times in float32; logits and q once more for the joint weights of the drafts but the first.
    weighed = _SEQUENCES * (_BLOCK - 1)
    yield Load("verify", (3.0 * rows + 2.0 * weighed) * vocab * 4, (6.0 * rows + 3.0 * weighed) * vocab)


def write_tables(page: Path, entries: Sequence[KernelEntry], shapes: Sequence[ModelShape]) -> None:
    """Write both tables between the page's two marks.

    Raises:
        ConfigError: the page has no marks.
    """
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(
            f"--docs {page}: must hold the lines {BEGIN!r} and {END!r}, once each and in this order"
        )
    tables = "\n".join([*_occupancy(entries), "", *_roofline(shapes)])
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    write_text(page, f"{before}{BEGIN}\n\n{tables}\n\n{after}")


def _occupancy(entries: Sequence[KernelEntry]) -> Iterator[str]:
    sms = sorted({entry.sm for entry in entries})
    yield "### What a program takes"
    yield ""
    yield (
        "Registers of a thread / shared memory of a program in KiB / programs resident on one multiprocessor, "
        "for every form. No form spills unless it says so."
    )
    yield ""
    yield "| kernel | form | threads | " + " | ".join(f"sm {sm}" for sm in sms) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(sms)
    by_key: dict[str, dict[int, KernelEntry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, {})[entry.sm] = entry
    for of_sm in by_key.values():
        first = next(iter(of_sm.values()))
        cells = [_cell(of_sm.get(sm)) for sm in sms]
        yield f"| {first.kernel.removesuffix('_kernel')} | {_form(first)} | {first.num_threads} | {' | '.join(cells)} |"


def _cell(entry: KernelEntry | None) -> str:
    if entry is None:
        return "-"
    cell = f"{entry.registers} / {entry.shared_bytes / 1024:.0f} / {entry.programs_per_sm}"
    return f"{cell} **spills {entry.spill_bytes}**" if entry.spill_bytes else cell


def _form(entry: KernelEntry) -> str:
    """Return what tells this form from the others of its kernel, in words."""
    c = entry.constants
    words: list[str] = []
    if "NUM_HEADS" in c and "NUM_KV_HEADS" in c:
        words.append(f"{c['NUM_HEADS']}/{c['NUM_KV_HEADS']} heads of {c['DIM']}")
    elif "NUM_KV_HEADS" in c or "NUM_HEADS" in c:
        words.append(f"{c.get('NUM_KV_HEADS', c.get('NUM_HEADS'))} heads of {c['DIM']}")
    if "MASK" in c:
        words.append(("chain", "tree", f"block of {c['FIXED_ROWS']}")[int(c["MASK"])])
        words.append(f"tile {c['BLOCK_M']}x{c['BLOCK_N']}")
        words += [word for name, word in (("WINDOW", "window"), ("SPLIT", "split")) if c[name]]
    if "HEAD" in c:
        words.append(f"{('no', 'vanilla', 'gated', 'RNN')[int(c['HEAD'])]} head")
        words.append(f"rank {c['RANK']}, {c['BLOCK_TILES']} tiles")
    if "TREE" in c:
        words.append("trees" if c["TREE"] else "chains")
    return ", ".join([*words, *_types(entry)])


def _types(entry: KernelEntry) -> Iterator[str]:
    """Yield in words the types of which a kernel has several forms."""
    kinds = [kind[1:] for _, kind in SIGNATURES[entry.kernel]]
    found = {kind: given[1:] for kind, (_, given) in zip(kinds, entry.arguments, strict=True)}
    own = found.get("weight", found.get("io", ""))
    if own:
        yield own
    if found.get("input", own) != own:
        yield f"queries and keys {found['input']}"


def _roofline(shapes: Sequence[ModelShape]) -> Iterator[str]:
    yield "### The least a launch can take"
    yield ""
    yield (
        "Estimates, not measurements: bytes over bandwidth or arithmetic over peak, whichever is longer, in "
        f"microseconds. {_SEQUENCES} sequences over {_CONTEXT} cached tokens, blocks of {_BLOCK}, 16-bit values, one "
        "layer; the products' data-sheet figures. `m` = memory decides, `a` = arithmetic does."
    )
    chips = list(CHIPS.values())
    yield ""
    yield "| target | launch | MB | GFLOP | " + " | ".join(chip.product for chip in chips) + " |"
    yield "| --- | --- | --- | --- |" + " --- |" * len(chips)
    for shape in shapes:
        for load in loads_of(shape):
            cells = []
            for chip in chips:
                memory = load.num_bytes / chip.bytes_per_s > load.flops / chip.flops_per_s
                floor = chip.floor_s(num_bytes=load.num_bytes, flops=load.flops) * 1e6
                cells.append(f"{floor:.1f} {'m' if memory else 'a'}")
            size = f"{load.num_bytes / 1e6:.1f} | {load.flops / 1e9:.1f}"
            yield f"| {shape.name} | {load.what} | {size} | {' | '.join(cells)} |"
