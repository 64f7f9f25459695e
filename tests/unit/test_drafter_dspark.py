"""Laws of the DSpark drafter: what is drawn, from what, for whom, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput, GreedyBlockExecutor
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoneDrafter
from dspark.errors import CheckpointError, ConfigError
from dspark.executors.interface import BlockDrafterExecutor
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from support.dense_drafter import PAGE_SIZE, Bench
from support.tiny_drafters import Head, tiny_target_config, write_tiny_drafter

TARGET = tiny_target_config()
HEADS: tuple[Head, ...] = ("vanilla", "gated", "rnn", "none")
LENGTHS = [5, 1, 12, 7]  # tokens of each sequence, the anchor included


class StepwiseOnly:
    """An executor without the fused call: only the methods of the contract."""

    def __init__(self, executor: BlockDrafterExecutor) -> None:
        self.config, self.name = executor.config, executor.name
        self.draft = executor.draft
        self.initial_state = executor.initial_state
        self.head_step = executor.head_step
        self.confidence_logits = executor.confidence_logits
        self.greedy_confidence = executor.greedy_confidence


class Scene:
    """Four sequences with observed context and a drafter for them."""

    def __init__(self, folder: Path, **kind: object) -> None:
        self.bench = Bench(folder, TARGET, **kind)
        self.mapping = self.bench.checkpoint.draft_to_target
        self.drafter = DSparkDrafter(self.bench.executor, self.mapping)
        self.stepwise = DSparkDrafter(StepwiseOnly(self.bench.executor), self.mapping)  # type: ignore[arg-type]
        batch, slots = self.bench.batch([length - 1 for length in LENGTHS])
        self.features = [self.bench.features(length - 1) for length in LENGTHS]
        self.texts = []
        for row, at in enumerate(slots):
            self.bench.executor.append_context(  # both drafters' own
                features=self.features[row], positions=np.arange(len(at), dtype=np.int32), slots=at
            )
            text = self.bench.rng.integers(0, TARGET.vocab_size, len(at)).tolist()
            self.texts.append([*text, int(batch.anchors[row])])
        self.pages = [[int(page) for page in row if page >= 0] for row in batch.page_table]

    def input(self, row: int, max_drafts: int = 99, *, noise: int = 0, **params: object) -> DraftInput:
        return DraftInput(
            sequence_id=row,
            token_ids=self.texts[row],
            max_drafts=max_drafts,
            sampler=TokenSampler(
                SamplingParams(**({"temperature": 0.0} | params)),  # type: ignore[arg-type]
                seed=noise,
                prompt_ids=self.texts[row],
                vocab_size=TARGET.vocab_size,
                eos_ids=(2,),
            ),
            pages=self.pages[row],
        )

    def position_logits(self, row: int, drafts: list[int]) -> tuple[list[np.ndarray], list[float]]:
        """Return U_k + B_k and the confidence logits of every position along the given drafts, by the
        formulas."""
        dense, config = self.bench.dense, self.bench.checkpoint.config
        hidden, base = dense.block(self.features[row], self.texts[row][-1], len(self.texts[row]) - 1)
        state = np.zeros(max(config.markov_rank, 1))
        logits, confidences, previous = [], [], self.texts[row][-1]
        for k in range(len(drafts)):
            total = base[k]
            if config.markov_rank:
                bias, after = dense.bias(previous, hidden[k], state)
                total = total + bias
                state = state if after is None else after
            logits.append(total)
            if config.enable_confidence_head:
                confidences.append(dense.confidence(previous, hidden[k]))
            previous = drafts[k]
        return logits, confidences


def rows_of(block: DraftBlock, row: int) -> list[int]:
    return block.tokens[row, : block.num_tokens[row]].tolist()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("draft_vocab", [None, 17])
@pytest.mark.parametrize("fused", [False, True])
def test_greedy_drafts_are_the_arg_max_of_the_formulas(
    tmp_path: Path, head: Head, draft_vocab: int | None, fused: bool
) -> None:
    scene = Scene(
        tmp_path / "d", head=head, draft_vocab=draft_vocab, small_w1=bool(draft_vocab) and head != "none"
    )
    drafter = scene.drafter if fused else scene.stepwise
    assert isinstance(drafter.executor, GreedyBlockExecutor) == fused
    block = drafter.propose([scene.input(row) for row in range(4)])
    assert block.distributions is None and block.confidence_logits is not None
    assert block.num_tokens.tolist() == [4] * 4
    for row in range(4):
        drafts = rows_of(block, row)
        logits, confidences = scene.position_logits(row, drafts)
        best = [int(values.argmax()) for values in logits]
        assert drafts == (best if scene.mapping is None else scene.mapping[best].tolist())
        np.testing.assert_allclose(block.confidence_logits[row], confidences, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_greedy_drafts_are_rated_by_their_own_probability_too(tmp_path: Path, fused: bool) -> None:
    scene = Scene(tmp_path / "d", draft_vocab=17, small_w1=True, greedy_confidence=True)
    weights = scene.bench.executor.greedy_confidence
    assert weights is not None
    drafter = scene.drafter if fused else scene.stepwise
    block = drafter.propose([scene.input(row) for row in range(4)])
    drawn = drafter.propose([scene.input(row, temperature=0.7) for row in range(4)])
    assert block.confidence_logits is not None and drawn.confidence_logits is not None
    for row in range(4):
        logits, confidences = scene.position_logits(row, rows_of(block, row))
        q = np.array([np.exp(values.max()) / np.exp(values).sum() for values in logits])
        wanted = weights[:, 0] * confidences + weights[:, 1] * np.log(q / (1.0 - q)) + weights[:, 2]
        np.testing.assert_allclose(block.confidence_logits[row], wanted, rtol=1e-3, atol=1e-4)
        _, confidences = scene.position_logits(row, rows_of(drawn, row))
        np.testing.assert_allclose(drawn.confidence_logits[row], confidences, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("params", [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 5, "seed": 3}])
def test_sampled_drafts_are_drawn_from_the_q_that_is_handed_on(
    tmp_path: Path, head: Head, params: dict[str, float]
) -> None:
    scene = Scene(tmp_path / "d", head=head, draft_vocab=20)
    inputs = [scene.input(row, noise=row, **params) for row in range(4)]
    block = scene.drafter.propose(inputs)
    assert block.distributions is not None
    for row, item in enumerate(inputs):
        drafts = rows_of(block, row)
        logits, confidences = scene.position_logits(row, drafts)
        for k, (draft, values) in enumerate(zip(drafts, logits, strict=True)):
            q = block.distributions[row][k]
            assert q is not None and q.prob(draft) > 0
            wanted = item.sampler.distribution(
                values.astype(np.float32), drafted=drafts[:k], token_ids=scene.mapping
            )
            np.testing.assert_allclose(q.dense(50), wanted.dense(50), rtol=1e-3, atol=1e-5)
            position = len(item.token_ids) + k
            assert draft == item.sampler.draw(q, position=position, purpose="draft")
        assert block.confidence_logits is not None
        np.testing.assert_allclose(block.confidence_logits[row], confidences, rtol=1e-3, atol=1e-4)


def mixed(scene: Scene) -> list[DraftInput]:
    return [
        scene.input(0, 3),
        scene.input(1, 0, temperature=1.0),
        scene.input(2, 99, temperature=0.9, seed=4, presence_penalty=1.5),
        scene.input(3, 1, repetition_penalty=1.7),
    ]


@pytest.mark.parametrize("head", HEADS)
def test_a_draft_does_not_depend_on_the_rest_of_the_batch(tmp_path: Path, head: Head) -> None:
    scene = Scene(tmp_path / "d", head=head)
    inputs = mixed(scene)
    together = scene.drafter.propose(inputs)
    assert together.num_tokens.tolist() == [3, 0, 4, 1]
    for row, item in enumerate(inputs):
        alone = scene.drafter.propose([item])
        assert rows_of(alone, 0) == rows_of(together, row)
        if together.num_tokens[row]:
            assert together.confidence_logits is not None and alone.confidence_logits is not None
            kept = slice(int(together.num_tokens[row]))
            np.testing.assert_allclose(
                alone.confidence_logits[0, kept], together.confidence_logits[row, kept], rtol=1e-3, atol=1e-4
            )
    assert together.distributions is not None
    kinds = [[q is None for q in of_row] for of_row in together.distributions]
    assert kinds == [[True] * 3, [], [False] * 4, [True]]


def test_drafts_count_as_history_for_the_penalties_of_later_ones(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "d", block_size=6)
    block = scene.drafter.propose([scene.input(2, frequency_penalty=2.0, presence_penalty=2.0)])
    drafts = rows_of(block, 0)
    logits, _ = scene.position_logits(2, drafts)
    sampler = scene.input(2, frequency_penalty=2.0, presence_penalty=2.0).sampler
    wanted = [
        sampler.greedy_token(values.astype(np.float32), drafted=drafts[:k]) for k, values in enumerate(logits)
    ]
    assert drafts == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_reduced_vocabulary_never_proposes_a_token_outside(tmp_path: Path, temperature: float) -> None:
    scene = Scene(tmp_path / "d", draft_vocab=7, block_size=8)
    assert scene.mapping is not None
    inside = set(scene.mapping.tolist())
    seen: set[int] = set()
    for seed in range(8):
        block = scene.drafter.propose(
            [scene.input(row, noise=seed, temperature=temperature) for row in range(4)]
        )
        seen.update(token for row in range(4) for token in rows_of(block, row))
        for of_row in block.distributions or ():
            for q in of_row:
                assert q is not None and set(np.flatnonzero(q.dense(50)).tolist()) <= inside
    assert seen <= inside and len(seen) > 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequence_with_broken_features_drafts_nothing_and_harms_nobody(
    tmp_path: Path, fused: bool, temperature: float
) -> None:
    scene = Scene(tmp_path / "d")
    drafter = scene.drafter if fused else scene.stepwise
    inputs = [scene.input(row, temperature=temperature) for row in range(4)]
    before = drafter.propose(inputs)
    page = scene.pages[2][0]
    broken = np.full((1, scene.bench.width), np.nan, np.float32)
    slots = np.array([page * PAGE_SIZE], np.int32)
    drafter_positions = np.zeros(1, np.int32)
    scene.bench.executor.append_context(features=broken, positions=drafter_positions, slots=slots)
    after = drafter.propose(inputs)
    assert after.num_tokens.tolist() == [4, 4, 0, 4]
    for row in (0, 1, 3):
        assert rows_of(after, row) == rows_of(before, row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_request_that_bans_the_whole_draft_vocabulary_gets_no_drafts(
    tmp_path: Path, temperature: float
) -> None:
    scene = Scene(tmp_path / "d", draft_vocab=5)
    assert scene.mapping is not None
    banned = tuple((int(token),) for token in scene.mapping)
    block = scene.drafter.propose(
        [scene.input(0, temperature=temperature, bad_words_ids=banned), scene.input(1)]
    )
    assert block.num_tokens.tolist() == [0, 4]


def test_banned_tokens_are_not_drafted(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "d")
    favourite = rows_of(scene.drafter.propose([scene.input(0)]), 0)[0]
    drafts = rows_of(scene.drafter.propose([scene.input(0, bad_words_ids=((favourite,),))]), 0)
    assert len(drafts) == 4 and favourite not in drafts


def test_same_seed_gives_the_same_drafts_another_seed_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "d", block_size=8)
    first, again, other = (
        rows_of(scene.drafter.propose([scene.input(0, temperature=3.0, noise=seed)]), 0) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_nobody_wants_drafts_nothing_runs(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "d")
    scene.bench.executor.draft = scene.bench.executor.draft_greedy = None  # type: ignore[assignment,method-assign]
    assert scene.drafter.propose([]).tokens.shape == (0, 4)
    assert scene.drafter.propose([scene.input(0, 0), scene.input(1, 0)]).num_tokens.tolist() == [0, 0]


# By name


class FakeTarget:
    """As much of a target executor as loading a drafter looks at."""

    def __init__(self, feature_layer_ids: tuple[int, ...]) -> None:
        self.feature_layer_ids = feature_layer_ids

    def embedding_and_head(self) -> tuple[np.ndarray, np.ndarray]:
        table = np.ones((50, 32), np.float32)
        return table, table


def load(spec: str, layer_ids: tuple[int, ...] = (0, 1), **options: object):  # type: ignore[no-untyped-def]
    return load_drafter(
        spec,
        target=TARGET,
        target_executor=FakeTarget(layer_ids),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def test_builtin_drafters_load_by_name() -> None:
    assert isinstance(load("none"), NoneDrafter) and isinstance(load("ngram"), NgramDrafter)
    assert peek_drafter("none", TARGET)[:2] == ((), 0)
    assert peek_drafter("ngram", TARGET)[:2] == ((), NgramDrafter().block_size)


def test_none_never_drafts() -> None:
    drafter = NoneDrafter()
    assert drafter.cache_page_bytes(16) == 0
    assert drafter.propose([]).tokens.shape == (0, 0)


def test_folder_loads_with_what_peek_said(tmp_path: Path) -> None:
    config = write_tiny_drafter(tmp_path / "d", TARGET, draft_vocab=9)
    outline = peek_drafter(str(tmp_path / "d"), TARGET)
    drafter = load(str(tmp_path / "d"), executor="torch")
    assert outline[:2] == (config.target_layer_ids, config.block_size)
    assert outline[:2] == (drafter.feature_layer_ids, drafter.block_size)
    assert drafter.name == "dspark" and drafter.cache_page_bytes(4) > 0


@pytest.mark.parametrize("spec", ["eagle", "", "NGRAM", "/nowhere/at/all"])
def test_other_names_are_refused(spec: str) -> None:
    for call in (lambda: load(spec), lambda: peek_drafter(spec, TARGET)):
        with pytest.raises(ConfigError, match="none, ngram or the folder") as caught:
            call()
        assert repr(spec) in str(caught.value)


def test_target_executor_without_the_features_is_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET)
    with pytest.raises(ConfigError, match=r"\(0, 1\).*\(0, 2\)"):
        load(str(tmp_path / "d"), (0, 2), executor="torch")


def test_folder_for_another_target_is_refused(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET)
    with pytest.raises(CheckpointError, match="60"):
        peek_drafter(str(tmp_path / "d"), replace(TARGET, vocab_size=60))


@pytest.mark.parametrize("options", [{"executor": "onnx"}, {"executor": "native", "device": "cuda"}])
def test_executor_that_cannot_run_it_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET)
    with pytest.raises(ConfigError, match="onnx|cuda"):
        load(str(tmp_path / "d"), **options)
