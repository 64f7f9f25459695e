"""The PyTorch target against a plain dense recomputation, behind shuffled page layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dspark.errors import CheckpointError, ConfigError
from dspark.executors.dtype import auto_dtype, torch_dtype
from dspark.executors.interface import StepBatch, TargetOutput
from dspark.executors.torch_target import TorchTarget
from dspark.models.config import RopeConfig, TargetConfig
from dspark.models.loading import load_target
from dspark.models.rope import inverse_frequencies
from dspark_plugins.reference.paged_attention import paged_attention, plan_attention
from support.tiny_models import (
    DictWeights,
    Weights,
    random_weights,
    tiny_config,
    write_tiny_gguf,
    write_tiny_target,
)

PAGE_SIZE = 4
ATOL = 2e-5  # float32 against float64, values of size 1 to 10
NUM_PAGES = 200
DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position_embeddings=16)
CONFIGS = {
    "llama": tiny_config(),
    "llama tied, no sharing": tiny_config(tie=True, num_heads=2, num_kv_heads=2, head_dim=16),
    "qwen3": tiny_config(architecture="qwen3", num_heads=6, num_kv_heads=2, head_dim=12),
    "qwen3 yarn": tiny_config(architecture="qwen3", rope=YARN),
}
Array = npt.NDArray[np.float64]


def _norm(x: Array, weight: npt.NDArray[np.float32], eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _rotate(heads: Array, positions: Sequence[int], config: TargetConfig) -> Array:
    """Rotate [T, H, D] with complex numbers: independent of the code under test."""
    frequencies, factor = inverse_frequencies(config.decoder.rope, config.decoder.head_dim)
    half = config.decoder.head_dim // 2
    pairs = heads[..., :half] + 1j * heads[..., half:]
    turned = pairs * factor * np.exp(1j * np.outer(positions, frequencies.astype(np.float64)))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def dense(
    config: TargetConfig,
    weights: Weights,
    tokens: Sequence[int],
    *,
    positions: Sequence[int] | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
) -> tuple[Array, list[Array]]:
    """Return logits [T, V] and the residual stream after the embedding and after every layer, in float64."""
    decoder, num_rows = config.decoder, len(tokens)
    eps, dim, shared = decoder.rms_norm_eps, decoder.head_dim, decoder.num_heads // decoder.num_kv_heads
    positions = range(num_rows) if positions is None else positions
    visible = np.tri(num_rows, dtype=bool) if visible is None else visible
    hidden = weights["embed_tokens.weight"][list(tokens)].astype(np.float64)
    stream = [hidden]
    for i in range(decoder.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        x = _norm(hidden, layer["input_layernorm.weight"], eps)
        q, k, v = (
            (x @ layer[f"self_attn.{name}_proj.weight"].T.astype(np.float64)).reshape(num_rows, -1, dim)
            for name in "qkv"
        )
        if decoder.qk_norm:
            q = _norm(q, layer["self_attn.q_norm.weight"], eps)
            k = _norm(k, layer["self_attn.k_norm.weight"], eps)
        q, k = _rotate(q, positions, config), _rotate(k, positions, config)
        k, v = k.repeat(shared, axis=1), v.repeat(shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(visible, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", probs, v).reshape(num_rows, -1)
        hidden = hidden + attended @ layer["self_attn.o_proj.weight"].T
        x = _norm(hidden, layer["post_attention_layernorm.weight"], eps)
        gate = x @ layer["mlp.gate_proj.weight"].T
        hidden = (
            hidden
            + (gate / (1 + np.exp(-gate)) * (x @ layer["mlp.up_proj.weight"].T))
            @ layer["mlp.down_proj.weight"].T
        )
        stream.append(hidden)
    head = weights["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _norm(hidden, weights["norm.weight"], eps) @ head.T.astype(np.float64), stream


@dataclass
class Rows:
    """What one sequence brings to a pass: a chain, or a tree when `parents` is given (-1 = the context)."""

    context: list[int]
    tokens: list[int]
    parents: list[int] | None = None

    def own_visible(self) -> npt.NDArray[np.bool_]:
        if self.parents is None:
            return np.tri(len(self.tokens), dtype=bool)
        seen = np.eye(len(self.tokens), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] |= seen[parent]
        return seen

    def positions(self) -> list[int]:
        return [len(self.context) + int(seen.sum()) - 1 for seen in self.own_visible()]


class Runner:
    """Keeps a target and hands out shuffled pages, so that no layout is special."""

    def __init__(
        self, config: TargetConfig, weights: Weights, *, dtype: str = "float32", **kwargs: object
    ) -> None:
        self.target = TorchTarget(config, DictWeights(weights), dtype=dtype, **kwargs)  # type: ignore[arg-type]
        self.target.allocate_cache(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        for cache in self.target._caches:
            cache.fill_(float("nan"))  # a slot that was never written must never be read
        self._free = list(np.random.default_rng(7).permutation(NUM_PAGES))

    def pages(self, num_tokens: int) -> list[int]:
        return [int(self._free.pop()) for _ in range(-(-num_tokens // PAGE_SIZE))]

    def run(
        self, rows: Sequence[Rows], pages: Sequence[list[int]], *, logit_rows: Sequence[int] | None = None
    ) -> TargetOutput:
        starts = np.cumsum([0, *(len(r.tokens) for r in rows)])
        table = np.full((len(rows), max(map(len, pages)) + 2), -1, np.int32)
        slots: list[int] = []
        for i, (row, its) in enumerate(zip(rows, pages, strict=True)):
            table[i, : len(its)] = its
            at = len(row.context) + np.arange(len(row.tokens))
            slots += (np.array(its)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE).tolist()
        ancestors = None
        if any(row.parents is not None for row in rows):
            width = -(-max(len(row.tokens) for row in rows) // 32)
            bits = np.zeros((starts[-1], width * 32), bool)
            for start, row in zip(starts, rows, strict=False):
                bits[start : start + len(row.tokens), : len(row.tokens)] = row.own_visible()
            ancestors = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return self.target.forward(
            StepBatch(
                tokens=_int32([t for r in rows for t in r.tokens]),
                positions=_int32([p for r in rows for p in r.positions()]),
                query_start=_int32(starts),
                context_len=_int32([len(r.context) for r in rows]),
                page_table=table,
                slots=_int32(slots),
                logit_rows=_int32(range(starts[-1]) if logit_rows is None else logit_rows),
                ancestors=ancestors,
            )
        )

    def fill(self, context: list[int], its: list[int]) -> None:
        if context:
            self.run([Rows([], context)], [its], logit_rows=[])


def _int32(values: object) -> npt.NDArray[np.int32]:
    return np.array(list(values), np.int32)  # type: ignore[call-overload]


def _expected(config: TargetConfig, weights: Weights, row: Rows) -> tuple[Array, list[Array]]:
    """Recompute the rows of one sequence from nothing."""
    n, own = len(row.context), len(row.tokens)
    visible = np.tri(n + own, dtype=bool)
    visible[n:, n:] = row.own_visible()
    positions = [*range(n), *row.positions()]
    logits, stream = dense(config, weights, [*row.context, *row.tokens], positions=positions, visible=visible)
    return logits[n:], [hidden[n:] for hidden in stream]


def _random_rows(rng: np.random.Generator, lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[Rows]:
    return [
        Rows(rng.integers(0, vocab_size, n).tolist(), rng.integers(0, vocab_size, own).tolist())
        for n, own in lengths
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixed_ragged_batch_equals_dense_recomputation(name: str) -> None:
    """Prefill, chunk of a prefill, decoding, verification of chains: all in one pass."""
    config = CONFIGS[name]
    weights = random_weights(config, seed=1)
    rng = np.random.default_rng(2)
    lengths = [(0, 37), (23, 1), (9, 5), (60, 1), (16, 20), (0, 1), (3, 8), (61, 2), (8, 1)]
    rows = _random_rows(rng, lengths, config.vocab_size)
    layers = (-1, 0, config.decoder.num_layers - 1)
    runner = Runner(config, weights, feature_layer_ids=layers)
    pages = [runner.pages(len(r.context) + len(r.tokens)) for r in rows]
    for row, its in zip(rows, pages, strict=True):
        runner.fill(row.context, its)

    output = runner.run(rows, pages)

    assert output.features is not None
    at = 0
    for row in rows:
        logits, stream = _expected(config, weights, row)
        span = slice(at, at + len(row.tokens))
        np.testing.assert_allclose(output.logits[span], logits, atol=ATOL, rtol=1e-5)
        wanted = np.concatenate([stream[layer + 1] for layer in layers], axis=1)
        np.testing.assert_allclose(output.features[span], wanted, atol=ATOL, rtol=1e-5)
        np.testing.assert_array_equal(output.argmax[span], logits.argmax(-1))
        at = span.stop
    assert output.logits.dtype == output.features.dtype == np.float32
    assert output.argmax.dtype == np.int32 and output.finite.all()


def test_trees_see_their_ancestors_and_nothing_else() -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config, seed=4)
    rng = np.random.default_rng(5)
    wide = [-1, 0, 0, 1, 1, 2, *(int(rng.integers(0, i)) for i in range(6, 40))]  # more than one mask word
    rows = _random_rows(rng, [(11, 6), (0, 40), (20, 1), (5, 3)], config.vocab_size)
    rows[0].parents, rows[1].parents = [-1, 0, 0, 1, 2, 2], wide
    runner = Runner(config, weights)
    pages = [runner.pages(len(r.context) + len(r.tokens)) for r in rows]
    for row, its in zip(rows, pages, strict=True):
        runner.fill(row.context, its)

    output = runner.run(rows, pages)

    wanted = np.concatenate([_expected(config, weights, row)[0] for row in rows])
    np.testing.assert_allclose(output.logits, wanted, atol=ATOL, rtol=1e-5)


def test_a_chain_is_a_tree_with_one_branch() -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config)
    chain, tree = Rows([1, 2, 3], [4, 5, 6, 7]), Rows([1, 2, 3], [4, 5, 6, 7], parents=[-1, 0, 1, 2])
    outputs = []
    for row in (chain, tree):
        runner = Runner(config, weights)
        its = runner.pages(7)
        runner.fill(row.context, its)
        outputs.append(runner.run([row], [its]).logits)
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 5), (7, 2), (9,)])
def test_chunked_prefill_equals_one_pass(chunks: tuple[int, ...]) -> None:
    config = CONFIGS["qwen3"]
    weights = random_weights(config, seed=6)
    tokens = [3, 14, 15, 9, 26, 5, 35, 8, 9]
    runner = Runner(config, weights, feature_layer_ids=(1,))
    its = runner.pages(len(tokens))
    logits, features, at = [], [], 0
    for size in chunks:
        output = runner.run([Rows(tokens[:at], tokens[at : at + size])], [its])
        logits.append(output.logits)
        features.append(output.features)
        at += size
    wanted, stream = dense(config, weights, tokens)
    np.testing.assert_allclose(np.concatenate(logits), wanted, atol=ATOL, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(features), stream[2], atol=ATOL, rtol=1e-5)  # type: ignore[arg-type]


def test_rejected_rows_are_overwritten_by_the_next_pass() -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config, seed=8)
    runner = Runner(config, weights)
    its = runner.pages(12)
    runner.fill([1, 2, 3], its)
    runner.run([Rows([1, 2, 3], [4, 40, 41, 42])], [its])  # 4 is kept, three drafts are not
    output = runner.run([Rows([1, 2, 3, 4], [5, 6])], [its])
    np.testing.assert_allclose(
        output.logits, dense(config, weights, [1, 2, 3, 4, 5, 6])[0][4:], atol=ATOL, rtol=1e-5
    )


def test_only_the_asked_rows_get_logits() -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config)
    runner = Runner(config, weights)
    rows = [Rows([], [1, 2, 3]), Rows([], [4, 5])]
    pages = [runner.pages(3), runner.pages(2)]
    everything = runner.run(rows, pages)
    some = runner.run(rows, pages, logit_rows=[2, 4])
    none = runner.run(rows, pages, logit_rows=[])
    np.testing.assert_allclose(some.logits, everything.logits[[2, 4]], atol=1e-5)
    assert none.logits.shape == (0, config.vocab_size) and len(none.argmax) == len(none.finite) == 0


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    config = tiny_config(vocab_size=64)
    weights = random_weights(config)
    weights["lm_head.weight"][:] = weights["lm_head.weight"][0]
    assert (Runner(config, weights).run([Rows([], [1, 2, 3])], [[0]]).argmax == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sequences_that_are_not_finite_are_flagged_and_fail_alone(value: float) -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config)
    weights["embed_tokens.weight"][13] = np.nan
    runner = Runner(config, weights)
    rows = [Rows([], [1, 13, 2]), Rows([], [3, 4])]
    output = runner.run(rows, [runner.pages(3), runner.pages(2)])
    # A sequence may go down as a whole, since a masked NaN is still a NaN; its neighbour must not.
    np.testing.assert_array_equal(output.finite[1:], [False, False, True, True])

    weights["embed_tokens.weight"][13] = 0
    weights["lm_head.weight"][17] = value
    assert not Runner(config, weights).run([Rows([], [1, 2])], [[3]]).finite.any()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_folder_and_a_gguf_of_the_same_weights_give_the_same_logits(
    tmp_path: Path, architecture: str
) -> None:
    config = tiny_config(architecture=architecture)
    folder = load_target(write_tiny_target(tmp_path / "hf", architecture=architecture, seed=9))
    file = load_target(write_tiny_gguf(tmp_path / "t.gguf", config, random_weights(config, seed=9)))
    outputs = []
    for found in (folder, file):
        target = TorchTarget(found.config, found.weights, dtype="float32")
        target.allocate_cache(num_pages=4, page_size=PAGE_SIZE)
        tokens = np.arange(8, dtype=np.int32)
        batch = StepBatch(
            tokens=tokens,
            positions=tokens,
            query_start=_int32([0, 8]),
            context_len=_int32([0]),
            page_table=_int32([2, 0]).reshape(1, 2),
            slots=_int32([8, 9, 10, 11, 0, 1, 2, 3]),
            logit_rows=tokens,
        )
        outputs.append(target.forward(batch).logits)
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_full_precision(dtype: str) -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config, seed=3)
    tokens = list(range(20))
    output = Runner(config, weights, dtype=dtype).run([Rows([], tokens)], [list(range(5))])
    wanted = dense(config, weights, tokens)[0]
    error = np.abs(output.logits - wanted).mean() / np.abs(wanted).mean()
    assert error < (0.08 if dtype == "bfloat16" else 0.02)
    assert len(np.unique(output.logits)) > 0.95 * output.logits.size  # float32 logits, not rounded ones


def test_logits_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIGS["qwen3 yarn"]
    weights = random_weights(config, seed=10)
    from support.tiny_models import hf_fields

    fields = {
        k: v for k, v in hf_fields(config).items() if k not in ("architectures", "model_type", "torch_dtype")
    }
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).eval()
    state = {
        name if name == "lm_head.weight" else f"model.{name}": torch.from_numpy(w)
        for name, w in weights.items()
    }
    theirs.load_state_dict(state)
    tokens = list(range(45, 5, -1))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0].numpy()
    output = Runner(config, weights).run([Rows([], tokens)], [list(range(10))])
    np.testing.assert_allclose(output.logits, wanted, atol=ATOL, rtol=1e-5)


def test_sliding_windows_hide_what_is_far_away() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(NUM_PAGES * PAGE_SIZE, 2, 2, 8, generator=generator)
    queries = torch.randn(5, 4, 8, generator=generator)
    plan = plan_attention(
        query_start=_int32([0, 3, 5]),
        context_len=_int32([6, 0]),
        page_table=_int32([4, 1, 9, -1]).reshape(2, 2),
        page_size=PAGE_SIZE,
        slots=_int32([6, 7, 8, 36, 37]),
        positions=_int32([6, 7, 8, 0, 1]),
        sliding_window=4,
    )
    output = paged_attention(queries, cache, plan, scale=0.5)
    sequence = [16, 17, 18, 19, 4, 5, 6, 7, 8]
    seen = [sequence[3:7], sequence[4:8], sequence[5:9], [36], [36, 37]]
    for row, slots in enumerate(seen):
        keys, values = cache[slots, 0].repeat_interleave(2, 1), cache[slots, 1].repeat_interleave(2, 1)
        probs = torch.softmax(torch.einsum("hd,khd->hk", queries[row], keys) * 0.5, -1)
        wanted = torch.einsum("hk,khd->hd", probs, values).flatten()
        torch.testing.assert_close(output[row], wanted)


def test_attention_is_never_padded_to_the_longest_sequence() -> None:
    contexts = [5, 6, 7, 900, 20, 400, 25, 3000]
    ends = np.cumsum([0, *(-(-(c + 1) // PAGE_SIZE) for c in contexts)])
    table = np.full((len(contexts), 800), -1, np.int32)
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        table[i, : stop - start] = np.arange(start, stop)
    plan = plan_attention(
        query_start=np.arange(len(contexts) + 1, dtype=np.int32),
        context_len=_int32(contexts),
        page_table=table,
        page_size=PAGE_SIZE,
        slots=_int32(ends[:-1] * PAGE_SIZE),
        positions=_int32(contexts),
    )
    work = sum(len(group.key_slots) for group in plan.groups)
    assert work <= 1.25 * sum(c + 1 for c in contexts) + 64 * len(plan.groups)
    assert len(plan.groups) < len(contexts)


def test_cache_pages_cost_what_they_say() -> None:
    target = TorchTarget(CONFIGS["llama"], DictWeights(random_weights(CONFIGS["llama"])), dtype="bfloat16")
    target.allocate_cache(num_pages=5, page_size=16)
    held = sum(cache.numel() * cache.element_size() for cache in target._caches)
    assert held == 5 * target.cache_page_bytes(16)


@pytest.mark.parametrize("tie", [True, False])
def test_embedding_and_head_are_given_in_float32(tie: bool) -> None:
    config = tiny_config(tie=tie)
    weights = random_weights(config)
    embedding, head = TorchTarget(config, DictWeights(weights), dtype="bfloat16").embedding_and_head()
    np.testing.assert_array_equal(embedding, weights["embed_tokens.weight"])
    np.testing.assert_array_equal(head, weights["embed_tokens.weight" if tie else "lm_head.weight"])
    assert (embedding is head) == tie


def test_unknown_dtypes_and_feature_layers_are_refused() -> None:
    config = CONFIGS["llama"]
    weights = DictWeights(random_weights(config))
    with pytest.raises(ConfigError, match="dtype is 'int8', allowed are float32, bfloat16, float16"):
        TorchTarget(config, weights, dtype="int8")
    for layer in (-2, 3):
        with pytest.raises(ConfigError, match=f"feature layer is {layer}, allowed is -1 to 2"):
            TorchTarget(config, weights, dtype="float32", feature_layer_ids=(layer,))


def test_auto_dtype_is_one_that_is_known() -> None:
    assert torch_dtype(auto_dtype()) in (torch.bfloat16, torch.float32)


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france() -> None:
    if not DEMO.is_file():
        pytest.skip(f"{DEMO} is not there: run make setup")
    found = load_target(DEMO)
    assert found.tokenizer is not None
    target = TorchTarget(found.config, found.weights, dtype=auto_dtype())
    target.allocate_cache(num_pages=32, page_size=16)
    prompt = found.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    table = np.random.default_rng(0).permutation(32).astype(np.int32)
    context_len, rows, answer = 0, prompt, []
    while len(answer) < 24:
        at = np.arange(context_len, context_len + len(rows))
        output = target.forward(
            StepBatch(
                tokens=_int32(rows),
                positions=_int32(at),
                query_start=_int32([0, len(rows)]),
                context_len=_int32([context_len]),
                page_table=table[None],
                slots=_int32(table[at // 16] * 16 + at % 16),
                logit_rows=_int32([len(rows) - 1]),
            )
        )
        context_len += len(rows)
        rows = [int(output.argmax[0])]
        if rows[0] in found.tokenizer.eos_ids:
            break
        answer += rows
    assert "Paris" in found.tokenizer.decode(answer)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    found = load_target(write_tiny_target(tmp_path))
    with pytest.raises(CheckpointError, match="lm_head_missing"):
        found.weights.float32("lm_head_missing")
