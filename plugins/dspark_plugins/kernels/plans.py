"""Which compiled form of a kernel a call needs, and its grid: plain numbers, no torch, no Triton language.

Shared by the launchers, by ahead-of-time compilation and by whoever launches the compiled kernels without either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "CHAIN",
    "FULL",
    "SPLIT_LEN",
    "SPLIT_ROWS",
    "SWEEP",
    "TREE",
    "VOCABULARY_TILE",
    "Variant",
    "attention",
    "attention_grid",
    "block_sample",
    "cdiv",
    "chain_weights",
    "merge_splits",
    "next_power_of_2",
    "num_phases",
    "num_splits",
    "row_limits",
    "schedule",
    "walk",
    "write_rows",
]

CHAIN, TREE, FULL = 0, 1, 2  # what a row sees of its own sequence's rows

SPLIT_LEN = 512  # context rows of one piece; fixed, so that the pieces do not depend on the batch
SPLIT_ROWS = 16  # passes with at most this many rows a sequence, on average, are split
_WIDEST_TILE = 64
SWEEP = 1024  # entries of a row of logits that a program looks at together
_MOST_TILES = 512  # of a row that a program looks at together; with more the compiler spills
VOCABULARY_TILE = 128  # draft logits of all blocks that a program corrects together

Constant = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel: everything but its run-time arguments."""

    kernel: str  # name of the function
    constants: Mapping[str, Constant]  # its constexpr arguments
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0  # of a thread; 0 = the compiler's guess, which may spill to fit more programs
    cooperative: bool = False  # all programs must be resident at once
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of its pointers that have no fixed type

    @property
    def key(self) -> str:
        """A name for files and tables, the same for equal variants."""
        parts = [self.kernel, *(f"{name}={_short(value)}" for name, value in sorted(self.constants.items()))]
        parts += [f"{name}:{dtype}" for name, dtype in sorted(self.dtypes.items())]
        return ",".join([*parts, f"w{self.num_warps}", f"s{self.num_stages}"])


def _short(value: Constant) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _tile(rows: int, group: int) -> int:
    """Return the (row, head) pairs of a tile: enough for `rows`, within what a tensor core takes and registers hold."""
    wanted = next_power_of_2(max(rows, 1) * group)
    return max(min(wanted, _WIDEST_TILE), next_power_of_2(group), 16)


def attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    input_dtype: str,
    rows: int,
    fixed_rows: int,
    mask: int,
    rope: bool,
    window: bool,
    write: bool,
    split: bool,
) -> Variant:
    """Return the form of `attention_kernel`.

    Arguments:
        dtype: of values, cache and output: fp16, bf16 or fp32.
        input_dtype: of queries and keys.
        rows: rows of a typical sequence; of no account in fp32.
        fixed_rows: rows of every sequence, 0 = ragged.
        mask: CHAIN, TREE or FULL.
    """
    wide = (
        dtype == "fp32"
    )  # products without tensor cores, whose operands fill the registers: least tiles, 8 warps
    group = num_heads // num_kv_heads
    tile = _tile(1 if wide else fixed_rows or rows, group)
    if fixed_rows and not split and head_dim > 64:
        tile = min(tile, max(32, next_power_of_2(group)))  # 64 rows of blocks spill
    whole = tile == 32 and not split and not fixed_rows  # with 4 warps the compiler spills on sm 80
    return Variant(
        "attention_kernel",
        {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "DIM": head_dim,
            "BLOCK_D": max(next_power_of_2(head_dim), 16),
            "BLOCK_M": tile,
            "BLOCK_N": 16 if wide else 32 if head_dim > 64 else 64,  # no spills
            "FIXED_ROWS": fixed_rows,
            "MASK": mask,
            "ROPE": rope,
            "WINDOW": window,
            "WRITE": write,
            "SPLIT": split,
            "DOT": "ieee" if wide else "tf32",
        },
        num_warps=8 if wide or whole or tile == _WIDEST_TILE else 4,  # no spills
        num_stages=3,  # page numbers, then keys and values, one tile ahead
        max_registers=255,
        dtypes={"io": dtype, "input": input_dtype},
    )


def attention_grid(
    variant: Variant, *, num_rows: int, num_sequences: int, num_pieces: int
) -> tuple[int, int, int]:
    """Return the grid of `attention_kernel`; some programs of a ragged pass find nothing to do."""
    constants = variant.constants
    num_kv_heads, fixed_rows = int(constants["NUM_KV_HEADS"]), int(constants["FIXED_ROWS"])
    block_rows = int(constants["BLOCK_M"]) // (int(constants["NUM_HEADS"]) // num_kv_heads)
    tiles = (
        num_sequences * cdiv(fixed_rows, block_rows) if fixed_rows else num_rows // block_rows + num_sequences
    )
    return tiles, num_kv_heads, num_pieces


def num_splits(*, num_rows: int, num_sequences: int, max_context: int) -> int:
    """Return into how many pieces contexts are cut; 1 = not at all."""
    if num_rows > SPLIT_ROWS * num_sequences:
        return 1
    return max(cdiv(max_context, SPLIT_LEN), 1)


def merge_splits(*, num_heads: int, head_dim: int, dtype: str) -> Variant:
    """Return the form of `merge_splits_kernel`; grid (T * num_heads,)."""
    block = max(next_power_of_2(head_dim), 16)
    return Variant(
        "merge_splits_kernel",
        {"NUM_HEADS": num_heads, "DIM": head_dim, "BLOCK_D": block},
        num_warps=1,
        dtypes={"io": dtype},
    )


def write_rows(*, num_kv_heads: int, head_dim: int, dtype: str, input_dtype: str, rope: bool) -> Variant:
    """Return the form of `write_rows_kernel`; grid (rows / BLOCK_ROWS rounded up, num_kv_heads)."""
    block = max(next_power_of_2(head_dim), 16)
    return Variant(
        "write_rows_kernel",
        {"NUM_KV_HEADS": num_kv_heads, "DIM": head_dim, "BLOCK_D": block, "BLOCK_ROWS": 16, "ROPE": rope},
        dtypes={"io": dtype, "input": input_dtype},
    )


def row_limits(*, dtype: str) -> Variant:
    """Return the form of `row_limits_kernel`; grid (T,)."""
    return Variant(
        "row_limits_kernel", {"BLOCK": SWEEP}, num_warps=8, max_registers=128, dtypes={"io": dtype}
    )


def chain_weights(*, dtype: str, mapped: bool) -> Variant:
    """Return the form of `chain_weights_kernel`; grid (T,). Arguments are those of `walk`."""
    return Variant(
        "chain_weights_kernel",
        {"MAPPED": mapped, "BLOCK": SWEEP},
        num_warps=8,
        max_registers=128,
        dtypes={"io": dtype},
    )


def walk(*, dtype: str, tree: bool, probs: bool, mapped: bool) -> Variant:
    """Return the form of `walk_kernel`; grid (R,).

    Arguments:
        dtype: of the logits.
        tree: whether parents are given.
        probs: whether drafts have distributions.
        mapped: whether those are over a reduced vocabulary.
    """
    constants: dict[str, Constant] = {"TREE": tree, "PROBS": probs, "MAPPED": mapped, "BLOCK": SWEEP}
    return Variant(
        "walk_kernel",
        {**constants, "BLOCK_CHILDREN": 32},
        num_warps=8,
        max_registers=128,
        dtypes={"io": dtype},
    )


def block_sample(
    *,
    vocab_size: int,
    rank: int,
    head: int,
    confidence: int,
    mapped: bool,
    previous: bool,
    dtype: str,
    weight_dtype: str,
    cooperative: bool,
) -> Variant:
    """Return the form of `block_sample_kernel`.

    Arguments:
        vocab_size: of the drafter.
        rank: of the sequential head.
        head: 0 none, 1 vanilla, 2 gated, 3 RNN.
        confidence: 0 none, 1 over h, 2 over h and W1[x].
        mapped: whether the draft vocabulary is a reduced one.
        previous: whether rows of W1 are found through a map.
        dtype: of the base logits.
        weight_dtype: of the head's weights and the hidden states.
        cooperative: whether all phases are one launch.
    """
    return Variant(
        "block_sample_kernel",
        {
            "HEAD": head,
            "RANK": rank,
            "BLOCK_RANK": max(next_power_of_2(rank), 16),
            "CONFIDENCE": confidence,
            "MAPPED": mapped,
            "PREVIOUS": previous,
            "BLOCK_V": VOCABULARY_TILE,
            "BLOCK_TILES": min(next_power_of_2(cdiv(vocab_size, VOCABULARY_TILE)), _MOST_TILES),
            "SWEEP": SWEEP // 2,  # no spills
            "DOT": "ieee" if weight_dtype == "fp32" else "tf32",
        },
        num_warps=8,
        num_stages=1 if weight_dtype == "fp32" else 2,  # no spills
        max_registers=255,
        cooperative=cooperative,
        dtypes={"io": dtype, "weight": weight_dtype},
    )


def num_phases(block_size: int) -> int:
    """Return the phases of `block_sample_kernel`: project, start, score and draw by position, share."""
    return 2 * block_size + 3


def schedule() -> Variant:
    """Return the form of `schedule_kernel`; grid (1,)."""
    return Variant("schedule_kernel", {"BLOCK": 128, "AHEAD": 32}, num_warps=8, max_registers=255)
