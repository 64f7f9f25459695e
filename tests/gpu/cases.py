"""Arguments of the operations, at awkward sizes and at those of real models, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dspark_plugins import ops
from dspark_plugins.kernels.sets import ModelShape
from support.paged_batches import make_paged_batch, tree_ancestors

__all__ = ["Case", "awkward_cases", "load_case", "moved"]

PAGE = 16
TREE = [[-1, 0, 0, 1, 1, 2], [-1], [-1, 0, 1, 1]]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operation."""

    name: str
    op: Callable[..., Any]
    arguments: tuple[Any, ...]  # on the CPU
    written: int | None = None  # the argument that is written in place
    num_rows: int | None = None  # rows of the first output that mean something


def moved(arguments: tuple[Any, ...], device: str) -> list[Any]:
    """Return arguments with copies of all tensors on a device."""
    return [a.detach().clone().to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


def awkward_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield small calls: prompts, decoding and verifying rows together, trees, pieces, page edges, padding."""
    ragged: tuple[tuple[str, list[int], list[int], dict[str, Any]], ...] = (
        ("mixed", [1, 8, 0, 40, 1, 3], [31, 7, 5, 0, 0, 48], {}),
        ("page edges", [1, 1, 1, 1], [15, 16, 17, 111], {}),
        ("long", [3, 1], [999, 513], {}),
        ("padding", [7, 1], [20, 0], {"padding": 5}),
        ("9/3 heads of 64", [5, 17], [33, 9], {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}),
        (
            "32/8 heads of 128",
            [8, 1, 130],
            [777, 3, 0],
            {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
        ),
        ("tree", [6, 1, 4], [31, 7, 0], {"ancestors": tree_ancestors(TREE, words=1)}),
    )
    for name, rows, context, more in ragged:
        for window in (0, 20):
            batch = make_paged_batch(rows, context, dtype=dtype, **more)
            arguments = batch.arguments(window=window)
            told = f"paged_attention, {name}, window {window}"
            yield Case(told, ops.paged_attention, arguments, written=3, num_rows=batch.num_rows)
    for context in ([0, 1, 16], [111, 999, 40]):
        yield _block_attention(context, dtype)
    for head in ("none", "vanilla", "gated", "rnn"):
        yield _block_sample(5, 300, 24, 0 if head == "none" else 8, head, dtype, sampled=True)
    yield _block_sample(5, 300, 24, 8, "gated", dtype, sampled=True, mapped=True)
    for drafted in ("one-hot", "full", "reduced"):
        yield _verify(TREE, drafted, tree=True)
        yield _verify([[*range(-1, 7)], [-1], [-1, 0], [*range(-1, 3)]], drafted, tree=False)
    yield _schedule(1, 7)
    yield _schedule(37, 7)


def _verify(parents: list[list[int]], drafted: str, *, tree: bool) -> Case:
    """Return a call with greedy, coupled and rejecting sequences, and two rows of padding."""
    random = torch.Generator().manual_seed(2)
    num, rows, vocab, whole = len(parents), sum(map(len, parents)), 1030, torch.int32
    draft_vocab = 515 if drafted == "reduced" else vocab
    logits = torch.randn(rows + 2, vocab, generator=random) * 2
    tokens = torch.randint(0, draft_vocab, (rows + 2,), generator=random).int()
    tokens[1] = int(logits[0].argmax())  # a draft that greedy decoding accepts
    starts = torch.tensor([0, *torch.tensor([len(one) for one in parents]).cumsum(0)], dtype=whole)
    probs = torch.softmax(torch.randn(rows, draft_vocab, generator=random), -1)
    prob_rows = torch.cat([torch.arange(rows), torch.full((2,), -1)]).int()
    inverse = torch.full((vocab,), -1, dtype=whole)
    inverse[:515] = torch.arange(515, dtype=whole)
    arguments = (
        *(logits, tokens, starts),
        torch.tensor([parent for one in parents for parent in one] + [0, 0], dtype=whole) if tree else None,
        *((None, None) if drafted == "one-hot" else (probs, prob_rows)),
        inverse if drafted == "reduced" else None,
        *(torch.full((num,), 50, dtype=whole), torch.arange(num) * 2**33),
        torch.tensor([0.0, 1.0, 0.7, 1.0])[:num],
        torch.tensor([0, 4, 0, 0], dtype=whole)[:num],
        *(torch.tensor([1.0, 0.9, 1.0, 0.95])[:num], torch.tensor([0.0, 0.0, 0.02, 0.0])[:num]),
        *(torch.tensor([0, 0, 1, 0], dtype=whole)[:num], 5),
    )
    return Case(f"verify, {'trees' if tree else 'chains'}, {drafted}", ops.verify, arguments)


def _schedule(num: int, block: int) -> Case:
    random = torch.Generator().manual_seed(3)
    arguments = (
        torch.rand(num, block, generator=random),
        torch.randint(0, block + 1, (num,), generator=random).int(),
        *(torch.tensor([3 * num, 4], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)),
        torch.linspace(1.0, 2.0, num * block + 1) ** 2,
    )
    return Case(f"schedule, {num} sequences", ops.schedule, arguments)


def _block_attention(context: list[int], dtype: torch.dtype, block: int = 7) -> Case:
    rows = make_paged_batch(
        [1] * len(context), context, dtype=dtype, num_heads=8, num_kv_heads=2, head_dim=64
    )
    random = torch.Generator().manual_seed(1)
    num = len(context)
    q, k, v = (torch.randn(num, block, n, 64, generator=random).to(dtype) for n in (8, 2, 2))
    angles = torch.rand(num, block, 32, generator=random)
    table = rows.page_table.clone()
    for i, length in enumerate(context):  # the new row's page may not be in the table yet
        table[i, length // PAGE] = int(rows.slots[i]) // PAGE
    lengths = (rows.context_len + 1).int()
    arguments = (
        *(q, k, v, rows.kv_cache, angles.cos(), angles.sin(), rows.k, rows.v, rows.cos, rows.sin),
        *(rows.slots, table, lengths, lengths, PAGE, 0.125, 0),
    )
    return Case(f"block_attention, contexts {context}", ops.block_attention, arguments, written=3)


def _block_sample(
    num: int,
    vocab: int,
    width: int,
    rank: int,
    head: str,
    dtype: torch.dtype,
    *,
    sampled: bool,
    block: int = 7,
    mapped: bool = False,
) -> Case:
    random = torch.Generator().manual_seed(4)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * std).to(dtype)

    def full(value: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num,), value, dtype=kind)

    mix = {"gated": (rank, width + rank), "rnn": (3 * rank, width + 2 * rank)}.get(head)
    temperature = full(1.0)
    temperature[: num // 2] = 0.0 if sampled else 1.0
    top_k, coupled = full(0, torch.int32), full(0, torch.int32)
    if sampled:
        top_k[-1], coupled[1::2] = 30, 1
    arguments = (
        *(normal(num, block, vocab, std=2.0).float(), normal(num, block, width)),
        torch.randint(0, vocab, (num,), generator=random).int(),
        *(full(block, torch.int32), full(100, torch.int32), torch.arange(num), temperature, top_k),
        *(full(1.0), full(0.0), coupled),
        normal(2 * vocab if mapped else vocab, rank) if rank else None,
        normal(vocab, rank, std=0.3) if rank else None,
        normal(*mix, std=0.2) if mix else None,
        normal(mix[0], std=0.2) if mix else None,
        normal(width + rank, std=0.1),
        torch.tensor([0.3]),
        torch.tensor([[0.8, 0.5, 0.1]]).expand(block, -1).contiguous(),
        torch.arange(0, 2 * vocab, 2, dtype=torch.int32) if mapped else None,
        torch.arange(2 * vocab, dtype=torch.int32).flip(0) if mapped else None,
    )
    told = f"block_sample, {head} head{', reduced vocabulary' if mapped else ''}"
    return Case(told, ops.block_sample, arguments)


def load_case(what: str, shape: ModelShape, *, num: int, context: int, block: int, rank: int) -> Case:
    """Return the call that an estimate of `dspark_build.kernel_report` is for.

    Raises:
        KeyError: an estimate of another name.
    """
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}

    def paged(rows: int, num: int, context: int) -> Case:
        batch = make_paged_batch([rows] * num, [context] * num, dtype=torch.bfloat16, **heads)
        return Case(what, ops.paged_attention, batch.arguments(), written=3)

    def drafter() -> Case:
        batch = make_paged_batch([block] * num, [context] * num, dtype=torch.bfloat16, **heads)
        assert batch.cos is not None and batch.sin is not None
        q, k, v, cos, sin = (
            x.view(num, block, *x.shape[1:]) for x in (batch.q, batch.k, batch.v, batch.cos, batch.sin)
        )
        new = [x[:num] for x in (batch.k, batch.v, batch.cos, batch.sin)]
        arguments = (
            *(q, k, v, batch.kv_cache, cos, sin, *new, torch.full((num,), -1, dtype=torch.int32)),
            *(batch.page_table, batch.context_len, batch.context_len, PAGE, shape.head_dim**-0.5, 0),
        )
        return Case(what, ops.block_attention, arguments, written=3)

    def verify() -> Case:
        rows = num * (1 + block)
        random = torch.Generator().manual_seed(2)
        whole = torch.int32
        arguments = (
            torch.randn(rows, shape.vocab_size, generator=random),
            torch.randint(0, shape.vocab_size, (rows,), generator=random).int(),
            torch.arange(0, rows + 1, 1 + block, dtype=whole),
            *(None, None, None, None),
            *(torch.full((num,), 50, dtype=whole), torch.arange(num), torch.ones(num)),
            *(
                torch.zeros(num, dtype=whole),
                torch.ones(num),
                torch.zeros(num),
                torch.zeros(num, dtype=whole),
            ),
            block,
        )
        return Case(what, ops.verify, arguments)

    makers: dict[str, Callable[[], Case]] = {
        "attention, target, decoding": lambda: paged(1, num, context),
        "attention, target, verifying": lambda: paged(1 + block, num, context),
        "attention, drafter's block": drafter,
        f"attention, prompt of {context}": lambda: paged(context, 1, 0),
        "block_sample": lambda: _block_sample(
            num,
            shape.vocab_size,
            shape.hidden_size,
            rank,
            "vanilla",
            torch.bfloat16,
            sampled=False,
            block=block,
        ),
        "verify": verify,
    }
    return makers[what]()
