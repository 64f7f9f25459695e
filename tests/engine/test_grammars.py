"""Answers that follow a grammar: always valid, with every drafter; what is drafted follows it too."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from dspark.cli import main
from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.generate import Completion
from dspark.request import Request
from dspark.sampling.grammar import GrammarCompiler
from support.engines import make_engine, make_request, run
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "dog", "France"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "legs", "tags"],
    "additionalProperties": False,
}
GUIDES = {
    "json_schema": json.dumps(SCHEMA),
    "regex": r"\d{3}-[a-f]{2,6}(é|ü)",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(
        tmp_path_factory.mktemp("target"), num_layers=2, with_tokenizer=True, max_context_len=1024
    )


@pytest.fixture(scope="module")
def specs(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafters")
    write_good_drafter(folder / "good", target)
    write_good_drafter(folder / "reduced", target, draft_vocab=120)
    return {
        "none": "none",
        "ngram": "ngram",
        "good": str(folder / "good"),
        "reduced": str(folder / "reduced"),
    }


def engine_of(target: Path, spec: str) -> Engine:
    return make_engine(target, drafter=spec, policy="none" if spec == "none" else "fixed:4")


def guided(
    engine: Engine, kind: str, guide: str | None, *, count: int = 4, **params: object
) -> list[Request]:
    assert engine.tokenizer is not None
    compile_grammar = GrammarCompiler(engine.tokenizer, vocab_size=engine.target.config.vocab_size)
    given = {"max_tokens": 400, "ignore_eos": False, "temperature": 1.0, **params}
    return [
        replace(
            make_request(
                engine.tokenizer.encode(f"The quick {index}"),
                guided_decoding_guide_type=kind,
                guided_decoding_guide=guide,
                **given,
            ),
            grammar=compile_grammar(kind, guide),
        )
        for index in range(count)
    ]


def is_valid(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(GUIDES["regex"], text) is not None
    answer = json.loads(text)
    return (
        set(answer) == {"name", "legs", "tags"}
        and answer["name"] in ("fox", "dog", "France")
        and 0 <= answer["legs"] <= 99
        and len(answer["tags"]) <= 3
        and set(answer["tags"]) <= {"a", "b"}
    )


@pytest.mark.parametrize("drafter", ["none", "ngram", "good", "reduced"])
@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_every_answer_is_valid_and_ends_by_itself(
    target: Path, specs: dict[str, str], drafter: str, kind: str
) -> None:
    engine = engine_of(target, specs[drafter])
    for params in ({}, {"temperature": 0.0}, {"seed": 3}, {"seed": 8, "ignore_eos": True, "logprobs": 2}):
        for done in run(engine, guided(engine, kind, GUIDES[kind], **params)):
            assert done.finish_reason == "stop"
            assert is_valid(kind, done.text or ""), done.text
    assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_p": 0.8}])
def test_speculation_does_not_change_a_guided_answer(
    target: Path, specs: dict[str, str], kind: str, params: dict[str, object]
) -> None:
    def ids(completions: list[Completion]) -> list[list[int]]:
        return [done.token_ids for done in completions]

    plain = engine_of(target, "none")
    expected = ids(run(plain, guided(plain, kind, GUIDES[kind], **params)))
    for drafter in ("ngram", "good", "reduced"):
        engine = engine_of(target, specs[drafter])
        assert ids(run(engine, guided(engine, kind, GUIDES[kind], **params))) == expected, drafter


def test_drafts_follow_the_grammar_so_that_they_are_accepted(target: Path, specs: dict[str, str]) -> None:
    engine = engine_of(target, specs["good"])
    done = run(engine, guided(engine, "json_schema", GUIDES["json_schema"], temperature=0.0))
    steps = [step for completion in done for step in completion.steps]
    accepted = sum(step.accepted for step in steps)
    # Most of a JSON answer is forced; a drafter that looks at the mask gets the forced tokens right.
    assert accepted / len(steps) > 1.5


def test_a_grammar_that_ends_inside_an_accepted_run_ends_the_answer_there(
    target: Path, specs: dict[str, str]
) -> None:
    engine = engine_of(target, specs["good"])
    ended_inside = 0
    for done in run(engine, guided(engine, "regex", "a{5}b{8}", temperature=0.0, count=6)):
        assert (done.text, done.finish_reason) == ("aaaaabbbbbbbb", "stop")
        committed = 1 + sum(step.accepted + 1 for step in done.steps)
        ended_inside += committed > len(done.token_ids)
    assert ended_inside > 0, "no run went past the end, so the test shows nothing"


def test_a_guided_answer_goes_with_stop_words_limits_and_bad_words(
    target: Path, specs: dict[str, str]
) -> None:
    engine = engine_of(target, specs["good"])
    (stopped,) = run(engine, guided(engine, "regex", "[ab]{3}-end", count=1, stop_words=("-",), seed=1))
    assert re.fullmatch("[ab]{3}", stopped.text or "") and stopped.finish_reason == "stop"
    (cut,) = run(engine, guided(engine, "regex", "a{50}", count=1, max_tokens=7))
    assert (len(cut.token_ids), cut.finish_reason) == (7, "length")
    assert engine.tokenizer is not None
    banned = tuple((token,) for token in engine.tokenizer.encode("a", add_special_tokens=False))
    (other,) = run(engine, guided(engine, "regex", "[ab]{20}", count=1, bad_words_ids=banned, seed=1))
    assert other.text == "b" * 20
    with pytest.raises(RequestError, match="bad_words"):
        run(engine, guided(engine, "regex", "a{20}", count=1, bad_words_ids=banned))


def test_guided_and_free_requests_share_a_batch(target: Path, specs: dict[str, str]) -> None:
    engine = engine_of(target, specs["good"])
    free = [make_request([3, 5, 7], seed=index, temperature=1.0) for index in range(3)]
    alone = [done.token_ids for done in run(engine, free)]
    both = run(engine, [*free, *guided(engine, "json_schema", GUIDES["json_schema"], seed=2)])
    assert [done.token_ids for done in both[:3]] == alone
    assert all(is_valid("json_schema", done.text or "") for done in both[3:])


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("regex", "(a"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "colour"}'),
        ("json_schema", "[]"),
        ("json_schema", '{"$ref": "#"}'),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused(target: Path, kind: str, guide: str) -> None:
    """In one line, without the library's inner state."""
    engine = engine_of(target, "none")
    with pytest.raises(RequestError, match="guided_decoding_guide") as caught:
        guided(engine, kind, guide)
    assert caught.value.value == guide
    assert "<state>" not in str(caught.value) and "\n" not in str(caught.value)


def test_dspark_generate_follows_the_guides_of_its_lines(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "The quick", "guided_decoding_guide_type": "regex", "guided_decoding_guide": guide}
        for guide in (GUIDES["regex"], "(a")
    ]
    lines[1]["prompt"] = "a line\u2028separator is no end of a line"
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    given = ["--target", str(target), "--requests", str(path), "--executor", "torch", "--capacity", "none"]
    assert main(["generate", *given, "--max-tokens", "60", "--threads", "1", "--json"]) == 1
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert is_valid("regex", good["text"])
    assert bad["error"].startswith("guided_decoding_guide: got '(a', allowed is a regex")


def test_a_guide_without_its_grammar_is_refused(target: Path) -> None:
    engine = engine_of(target, "none")
    with pytest.raises(RequestError, match="grammar"):
        engine.add(make_request([1], guided_decoding_guide_type="json"))
