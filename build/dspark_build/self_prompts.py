"""Prompts that the target writes itself: it continues an opened user turn of its own chat template.

A chat model has seen many kinds of questions; what it puts into the user's place is more varied than
templates and costs a few seconds per hundred. What it writes is kept when the turn was closed, is not
too short, mostly letters, and new.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.errors import ConfigError
from dspark.models.tokenizer import Tokenizer

from dspark_build.answers import Answerer, Question
from dspark_build.prompt_files import Prompt, fingerprint

__all__ = ["opened_user_turn", "write_prompts"]

MIN_CHARS = 12
ROUND = 256  # questions of one call
MAX_BARREN_ROUNDS = 3  # rounds in a row that gave next to nothing


def opened_user_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of a chat up to where the user's text begins.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise ConfigError("--self-prompts: the target has no chat template, so it has no user turn to fill")
    first, second = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in ("A", "(")
    )
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return tuple(first[:same])


def write_prompts(
    num: int, answerer: Answerer, tokenizer: Tokenizer, *, max_tokens: int, seed: int
) -> list[Prompt]:
    """Return up to `num` different prompts, each sampled at temperature 1 with a seed of its own.

    Arguments:
        max_tokens: longest prompt; turns that are still open there are dropped.
    """
    opened = opened_user_turn(tokenizer)
    prompts: dict[str, Prompt] = {}
    asked = barren = 0
    while len(prompts) < num and barren < MAX_BARREN_ROUNDS:
        before = len(prompts)
        questions = [
            Question(prompt_id=0, prompt_ids=opened, temperature=1.0, seed=(seed << 32) + asked + i)
            for i in range(ROUND)
        ]
        asked += ROUND
        for answer in answerer.answer(questions, max_tokens=max_tokens):
            text = None if answer is None else _text(answer.token_ids, tokenizer)
            if text is not None:
                prompts.setdefault(fingerprint(text), Prompt(text=text, source="self"))
        barren = barren + 1 if len(prompts) - before < ROUND // 50 else 0
    return list(prompts.values())[:num]


def _text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """Return the text of a closed turn that looks like a question, else None."""
    if token_ids[-1] not in tokenizer.eos_ids:
        return None
    text = tokenizer.decode(list(token_ids[:-1])).strip()
    letters = sum(character.isalpha() or character.isspace() for character in text)
    if len(text) < MIN_CHARS or letters < 0.6 * len(text) or "\ufffd" in text:
        return None
    return text
