"""The target answers prompts: sharded, resumable, the same whatever was interrupted.

A plan (which prompt, which temperature, which seed) is a pure function of the settings, cut into shards.
A shard is one file, written when all its answers are there; running the same command again makes only
what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from dspark.errors import CheckpointError

from dspark_build.files import write_atomically

__all__ = [
    "Answer",
    "AnswerShard",
    "Answerer",
    "EngineAnswerer",
    "Question",
    "make_answers",
    "plan_questions",
    "shard_path",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One answer to be made."""

    prompt_id: int  # index into the prompts of the manifest
    prompt_ids: tuple[int, ...]  # tokens, chat template applied
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens that followed; an end token, where the model gave one, is the last of them."""

    token_ids: tuple[int, ...]


class Answerer(Protocol):
    """Whatever answers a list of questions; the order is kept, None stands for a question that failed."""

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer | None]: ...


class EngineAnswerer:
    """Answers through the engine, without drafts: all questions of a call run together.

    Arguments:
        target: folder, file or hub name.
        batch: questions decoded together.
        threads: 0 = one per core.
    """

    def __init__(
        self, target: str, *, batch: int, threads: int, dtype: str = "auto", executor: str = "auto"
    ) -> None:
        from dspark.config import ServeConfig
        from dspark.runtime import build_engine

        self._engine = build_engine(
            ServeConfig(
                target=target,
                drafter="none",
                policy="none",
                dtype=dtype,
                executor=executor,
                max_batch_size=batch,
                num_threads=threads,
            )
        )
        tokenizer = self._engine.tokenizer
        self._eos = {*self._engine.target.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}

    def answer(self, questions: Sequence[Question], *, max_tokens: int) -> list[Answer | None]:
        from dspark.generate import complete_all
        from dspark.request import Request, SamplingParams

        requests = [
            Request(
                prompt_ids=question.prompt_ids,
                params=SamplingParams(
                    max_tokens=max_tokens, temperature=question.temperature, seed=question.seed
                ),
                emit=lambda _output: None,
            )
            for question in questions
        ]
        answers: list[Answer | None] = []
        for completion in complete_all(self._engine, requests):
            if completion.error is not None or not completion.token_ids:
                answers.append(None)
                continue
            ids = list(completion.token_ids)
            if completion.finish_reason == "stop" and ids[-1] not in self._eos and self._eos:
                ids.append(min(self._eos))
            answers.append(Answer(token_ids=tuple(ids)))
        return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShard:
    """Answers of one file. Sequence i is tokens[offsets[i] : offsets[i+1]], its first `prompt_len[i]` the
    prompt.
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]  # [n+1]
    prompt_len: npt.NDArray[np.int32]  # [n]
    prompt_id: npt.NDArray[np.int32]  # [n]
    temperature: npt.NDArray[np.float32]  # [n]

    @classmethod
    def of_answers(cls, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> AnswerShard:
        """Return the shard of these questions and the tokens that answered each."""
        rows = [np.array([*q.prompt_ids, *ids], np.int32) for q, ids in zip(questions, answers, strict=True)]
        return cls(
            tokens=np.concatenate(rows) if rows else np.zeros(0, np.int32),
            offsets=np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64),
            prompt_len=np.array([len(q.prompt_ids) for q in questions], np.int32),
            prompt_id=np.array([q.prompt_id for q in questions], np.int32),
            temperature=np.array([q.temperature for q in questions], np.float32),
        )

    def __len__(self) -> int:
        return len(self.prompt_len)

    def sequence(self, index: int) -> npt.NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.offsets[-1] - self.prompt_len.sum())

    def save(self, path: Path) -> None:
        """Write the shard. Raises CapacityError when the disk is full."""
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if len(self.tokens) and int(self.tokens.max()) < 2**16:
            arrays["tokens"] = self.tokens.astype(np.uint16)
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))

    @classmethod
    def load(cls, path: Path) -> AnswerShard:
        """Read a shard.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            with np.load(path) as stored:
                arrays = {name: stored[name] for name in cls.__dataclass_fields__}
                return cls(**(arrays | {"tokens": arrays["tokens"].astype(np.int32)}))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); delete it and run `data` again"
            ) from error


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"answers-{index:05d}.npz"


def plan_questions(
    prompts: Sequence[tuple[int, ...]],
    *,
    temperatures: Sequence[float],
    answers_per_prompt: int,
    shard_size: int,
    seed: int,
) -> list[list[Question]]:
    """Return the questions of every shard: each a mix of all prompts, so that the first shards can train
    already.

    The k-th answer of prompt i is asked at temperature number (i + k) mod T, so every temperature meets
    every kind.
    """
    rng = np.random.default_rng(seed)
    pairs = [(i, k) for k in range(answers_per_prompt) for i in range(len(prompts))]
    order = rng.permutation(len(pairs))
    questions = [
        Question(
            prompt_id=i,
            prompt_ids=prompts[i],
            temperature=float(temperatures[(i + k) % len(temperatures)]),
            seed=int(np.random.SeedSequence((seed, i, k)).generate_state(1, np.uint64)[0]),
        )
        for i, k in (pairs[int(at)] for at in order)
    ]
    return [questions[first : first + shard_size] for first in range(0, len(questions), shard_size)]


def make_answers(
    folder: Path,
    plan: Sequence[Sequence[Question]],
    answerer: Callable[[], Answerer],
    *,
    max_tokens: int,
    tell: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> None:
    """Make every shard that is missing. A stop is honoured between shards.

    Arguments:
        answerer: called once, when something is missing.
    """
    missing = [index for index in range(len(plan)) if not shard_path(folder, index).exists()]
    if not missing:
        return
    model = answerer()
    started, tokens_made = time.monotonic(), 0
    for done, index in enumerate(missing, 1):
        if should_stop():
            return
        questions = plan[index]
        answers = model.answer(questions, max_tokens=max_tokens)
        shard = _to_shard(questions, answers)
        shard.save(shard_path(folder, index))
        tokens_made += shard.num_answer_tokens
        elapsed = time.monotonic() - started
        left = elapsed / done * (len(missing) - done)
        failed = sum(answer is None for answer in answers)
        tell(
            f"answers: shard {index + 1} of {len(plan)}, {tokens_made} tokens, "
            f"{tokens_made / elapsed:.0f} tokens/s, "
            f"{left / 60:.1f} min left" + (f", {failed} failed" if failed else "")
        )


def _to_shard(questions: Sequence[Question], answers: Sequence[Answer | None]) -> AnswerShard:
    kept = [(q, a.token_ids) for q, a in zip(questions, answers, strict=True) if a is not None]
    return AnswerShard.of_answers([q for q, _ in kept], [ids for _, ids in kept])
