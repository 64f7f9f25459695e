"""The sequential head: the kernel is the plain version, and the plain version draws what the engine would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark_plugins import ops
from dspark_plugins.kernels import plans
from dspark_plugins.ops.launchers.block_sample import launch_block_sample
from torch import Tensor

HEADS = ["none", "vanilla", "gated", "rnn"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "coupled": {"coupled": 1},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "all, coupled": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "coupled": 1},
}
SEEDS = [-3, 2**40, 5, 0, 77]
POSITION = 100


def arguments(
    head: str,
    modes: Sequence[str] = tuple(MODES),
    *,
    block_size: int = 3,
    vocab_size: int = 300,
    hidden_size: int = 24,
    rank: int = 8,
    confidence: int = 2,
    reduced: bool = False,
    dtype: torch.dtype = torch.float32,
    sharpness: float = 2.0,
) -> list[Tensor | None]:
    random = torch.Generator().manual_seed(4)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * std).to(dtype)

    n, target_size = len(modes), vocab_size * 2 if reduced else vocab_size
    settings = [MODES[mode] for mode in modes]
    mix_rows, mix_columns = {
        "gated": (rank, hidden_size + rank),
        "rnn": (3 * rank, hidden_size + 2 * rank),
    }.get(head, (0, 0))
    has_head = head != "none"
    seen = hidden_size + (rank if confidence == 2 and has_head else 0)
    draft_to_target = torch.randperm(target_size, generator=random)[:vocab_size].sort().values.int()
    previous_rows = torch.randint(0, 40, (target_size,), generator=random).int()
    return [
        *(normal(n, block_size, vocab_size, std=sharpness), normal(n, block_size, hidden_size)),
        torch.randint(0, target_size, (n,), generator=random).int(),
        torch.tensor(
            [block_size - i % 3 if block_size > 2 else block_size for i in range(n)], dtype=torch.int32
        ),
        torch.full((n,), POSITION, dtype=torch.int32),
        torch.tensor([SEEDS[i % len(SEEDS)] for i in range(n)]),
        torch.tensor([s.get("temperature", 1.0) for s in settings]),
        torch.tensor([s.get("top_k", 0) for s in settings], dtype=torch.int32),
        torch.tensor([s.get("top_p", 1.0) for s in settings]),
        torch.tensor([s.get("min_p", 0.0) for s in settings]),
        torch.tensor([s.get("coupled", 0) for s in settings], dtype=torch.int32),
        normal(40 if reduced else target_size, rank) if has_head else None,
        normal(vocab_size, rank, std=0.5) if has_head else None,
        normal(mix_rows, mix_columns, std=0.3) if mix_rows else None,
        normal(mix_rows, std=0.3) if mix_rows else None,
        normal(seen, std=0.2) if confidence else None,
        torch.tensor([0.3]) if confidence else None,
        torch.randn(block_size, 3, generator=random) if confidence else None,
        draft_to_target if reduced else None,
        previous_rows if reduced and has_head else None,
    ]


def check(
    given: list[Tensor | None], *, tolerance: float = 2e-5, **launch: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = launch_block_sample(*given, **launch)
    expected = ops.block_sample(*given)
    tokens, num_tokens, probs, rated = out
    assert torch.equal(num_tokens, expected[1])
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(rated, expected[3], atol=tolerance, rtol=tolerance)
    temperature = given[6]
    assert temperature is not None
    for i, heat in enumerate(temperature.tolist()):
        drawn = int(num_tokens[i]) if heat > 0 else 0
        torch.testing.assert_close(
            probs[i, :drawn], expected[2][i, :drawn], atol=tolerance, rtol=tolerance * 10
        )
        torch.testing.assert_close(probs[i, :drawn].sum(-1), torch.ones(drawn), atol=1e-5, rtol=0)
    return out


@pytest.mark.parametrize("head", HEADS)
def test_every_head_in_every_mode(head: str) -> None:
    check(arguments(head))


@pytest.mark.parametrize("head", HEADS)
def test_phases_launched_one_by_one_over_many_programs(head: str) -> None:
    check(arguments(head, ["drawn", "coupled", "greedy"]), num_programs=3, one_launch=False)


@pytest.mark.parametrize("head", ["none", "gated"])
def test_reduced_vocabularies(head: str) -> None:
    check(arguments(head, reduced=True))


@pytest.mark.parametrize(("vocab_size", "block_size"), [(1, 1), (7, 7), (128, 2), (999, 1), (4099, 1)])
def test_any_vocabulary_and_block(vocab_size: int, block_size: int) -> None:
    check(arguments("vanilla", ["drawn", "coupled", "greedy"], vocab_size=vocab_size, block_size=block_size))


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_more_tiles_than_are_looked_at_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_TILES", 2)
    given = arguments("none", ["drawn", "coupled", "greedy", "all"] * 2, vocab_size=999, block_size=2)
    base, seeds = given[0], given[5]
    assert base is not None and seeds is not None
    seeds += seed
    base[0, 1, 900] = float("nan")
    base[1, :, :700] = float("-inf")
    base[2, 0, [500, 990]] = 50.0  # equals in two of the pieces
    base[4, :, 300:] = float("-inf")
    tokens, num_tokens, _, _ = check(given)
    assert num_tokens[0] == 1 and tokens[2, 0] == 500 and int(tokens[1].min()) >= 700
    assert int(tokens[4, : num_tokens[4]].max()) < 300


@pytest.mark.parametrize(("hidden_size", "rank"), [(1, 1), (111, 7), (999, 16), (64, 40)])
def test_any_width_and_rank(hidden_size: int, rank: int) -> None:
    check(arguments("rnn", ["drawn", "greedy"], hidden_size=hidden_size, rank=rank), tolerance=2e-4)


@pytest.mark.parametrize("confidence", [0, 1])
def test_other_confidence_heads(confidence: int) -> None:
    check(arguments("vanilla", ["drawn"], confidence=confidence))


def test_more_blocks_than_a_tile_holds() -> None:
    check(arguments("vanilla", ["drawn", "coupled", "greedy"] * 6, block_size=1))


def test_half_precision() -> None:
    given = arguments("gated", dtype=torch.float16, sharpness=6.0)  # the likeliest token well ahead
    check(given, tolerance=2e-2)


def test_blocks_end_where_a_row_is_not_finite() -> None:
    given = arguments("vanilla", ["drawn"] * 4)
    base, hidden = given[0], given[1]
    assert base is not None and hidden is not None
    base[0, 0, 5] = float("nan")
    base[1, 1, 299] = float("inf")
    hidden[2, 0, 3] = float("nan")
    _, num_tokens, _, _ = check(given)
    assert num_tokens.tolist() == [0, 1, 0, 3]


def test_impossible_tokens_are_never_drawn() -> None:
    given = arguments("none", ["drawn", "coupled", "greedy", "all"])
    base = given[0]
    assert base is not None
    base[..., torch.arange(300) % 7 != 3] = float("-inf")
    tokens, num_tokens, _, _ = check(given)
    assert all(
        token % 7 == 3 for row, n in zip(tokens.tolist(), num_tokens, strict=True) for token in row[:n]
    )


def test_no_blocks() -> None:
    tokens, _, probs, _ = launch_block_sample(*arguments("vanilla", []))
    assert tokens.shape == (0, 3) and probs.shape == (0, 3, 300)


def test_a_block_has_the_same_bits_alone_and_in_company_and_again() -> None:
    given = arguments("gated")
    tokens, _, probs, _ = launch_block_sample(*given)
    again = launch_block_sample(*given)
    assert torch.equal(tokens, again[0]) and torch.equal(probs[1:, :1], again[2][1:, :1])
    alone = [x[1:2] if x is not None and i < 11 else x for i, x in enumerate(given)]
    assert torch.equal(launch_block_sample(*alone)[2][:, :2], probs[1:2, :2])


def test_the_op_is_registered_as_it_behaves() -> None:
    given = tuple(arguments("rnn", ["drawn", "greedy"], vocab_size=20))
    torch.library.opcheck(
        torch.ops.dspark.block_sample.default, given, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("mode", MODES)
def test_plain_drafts_are_the_engines(mode: str, head: str) -> None:
    """The engine's own loop: its sampler draws each position from logits that the plain head made."""
    given = arguments(head, [mode] * 3, reduced=True)
    base, hidden, anchors, w1, w2 = given[0], given[1], given[2], given[11], given[12]
    mix, bias, draft_to_target, rows = given[13], given[14], given[18], given[19]
    assert base is not None and hidden is not None and anchors is not None and draft_to_target is not None
    tokens, num_tokens, probs, _ = ops.block_sample(*given)
    params = SamplingParams(**{k: v for k, v in MODES[mode].items() if k != "coupled"})
    for i in range(3):
        sampler = TokenSampler(
            params,
            seed=SEEDS[i] % 2**64,
            prompt_ids=[0] * POSITION,
            vocab_size=600,
            eos_ids=[],
            rule="coupled" if "coupled" in MODES[mode] else "rejection",
        )
        drafted: list[int] = []
        previous, state = int(anchors[i]), torch.zeros(8)
        for k in range(int(num_tokens[i])):
            logits = base[i, k].clone()
            if w1 is not None and w2 is not None and rows is not None:
                e = w1[rows[previous].long()]
                out = e
                if head == "gated" and mix is not None and bias is not None:
                    out = torch.sigmoid(mix @ torch.cat([hidden[i, k], e]) + bias) * e
                if head == "rnn" and mix is not None and bias is not None:
                    gate, candidate, out = (mix @ torch.cat([state, e, hidden[i, k]]) + bias).chunk(3)
                    state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                    out = torch.tanh(out)
                logits += w2 @ out
            q = sampler.distribution(logits.numpy(), drafted=drafted, token_ids=draft_to_target.numpy())
            previous = sampler.draw(q, position=POSITION + k, purpose="draft")
            drafted.append(previous)
            if not params.greedy:
                np.testing.assert_allclose(probs[i, k], q.dense(600)[draft_to_target.numpy()], atol=1e-6)
        assert tokens[i, : len(drafted)].tolist() == drafted
