"""Laws of answers made together with their features, and of prompts that the target writes itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from dspark.errors import ConfigError
from dspark.models.loading import load_target
from dspark_build.answers import Answer, AnswerShard, shard_path
from dspark_build.cli import main
from dspark_build.feature_cache import FeatureStore, feature_folder
from dspark_build.self_prompts import opened_user_turn, write_prompts
from support.tiny_models import write_tiny_target

VOCAB, LAYERS = 300, (0, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same greedy questions answered in one pass with features, and in two stages by the engine."""
    home = tmp_path_factory.mktemp("answers")
    write_tiny_target(
        home / "target", vocab_size=VOCAB, with_tokenizer=True, eos_ids=(2,), max_context_len=256
    )
    lines = [json.dumps({"turns": [f"{'add ' * (i % 5)}{i} and {i * 7}"]}) for i in range(23)]
    (home / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    common = [
        *("data", "--target", str(home / "target"), "--feature-layers", "0,2", "--executor", "torch"),
        *("--dtype", "float32", "--batch", "5"),
    ]
    asked = ["--prompts", str(home / "prompts.jsonl"), "--max-tokens", "20", "--shard-size", "8"]
    asked += ["--temperatures", "0"]
    assert main([*common, *asked, "--out", str(home / "together")]) == 0
    assert main([*common, *asked, "--out", str(home / "apart"), "--only", "answers"]) == 0
    assert main([*common, "--out", str(home / "apart"), "--only", "features"]) == 0  # needs no prompts
    return home / "together", home / "apart"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_pass_gives_the_answers_and_features_of_two_stages(folders, index):
    together, apart = (AnswerShard.load(shard_path(folder, index)) for folder in folders)
    assert together.tokens.tolist() == apart.tokens.tolist()
    assert together.prompt_id.tolist() == apart.prompt_id.tolist()
    mine, theirs = (FeatureStore(feature_folder(f, LAYERS), index, width=64) for f in folders)
    torch.testing.assert_close(mine.rows.float(), theirs.rows.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(mine.lse, theirs.lse, atol=2e-2, rtol=1e-3)
    assert (mine.argmax == theirs.argmax).float().mean() > 0.95  # two stages read it from bfloat16 features
    generated = np.concatenate([together.sequence(i)[together.prompt_len[i] :] for i in range(len(together))])
    assert mine.argmax.tolist() == generated.tolist()  # greedy: the label is the arg-max


@pytest.fixture
def tokenizer(tmp_path):
    write_tiny_target(tmp_path, vocab_size=VOCAB, with_tokenizer=True, eos_ids=(2,))
    return load_target(tmp_path).tokenizer


class Scripted:
    """Answers with given texts in turn, each closed by the end token unless it says otherwise."""

    def __init__(self, tokenizer, texts, *, closed=True):
        self.tokenizer, self.texts, self.closed, self.asked = tokenizer, texts, closed, []

    def answer(self, questions, *, max_tokens):
        first = len(self.asked)
        self.asked += questions
        end = [self.tokenizer.eos_ids[0]] if self.closed else []
        texts = [self.texts[(first + i) % len(self.texts)] for i in range(len(questions))]
        return [Answer(token_ids=(*self.tokenizer.encode(text), *end)[:max_tokens]) for text in texts]


def test_prompts_of_the_target_are_new_closed_and_mostly_letters(tokenizer):
    texts = ["what is the sum of two", "What is  the sum of two", "ab", "1 + 2 + 3 + 4 + 5 + 6 + 7"]
    answerer = Scripted(tokenizer, texts)
    assert len(write_prompts(5, answerer, tokenizer, max_tokens=30, seed=3)) == 1
    seeds = [question.seed for question in answerer.asked]
    assert len(set(seeds)) == len(seeds) and {q.temperature for q in answerer.asked} == {1.0}
    assert write_prompts(5, Scripted(tokenizer, texts, closed=False), tokenizer, max_tokens=30, seed=3) == []


def test_the_opened_turn_is_what_every_chat_prompt_starts_with(tokenizer):
    opened = opened_user_turn(tokenizer)
    for text in ("hello there", "zebra"):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert tuple(ids[: len(opened)]) == opened
    tokenizer._chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        opened_user_turn(tokenizer)
