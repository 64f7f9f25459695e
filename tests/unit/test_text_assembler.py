"""Laws of the text assembler: tokens in, deltas out."""

from __future__ import annotations

from dspark.text.assembler import TextAssembler
from dspark.text.stop import StopMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

_PIECES = st.lists(
    st.one_of(
        st.binary(max_size=4), st.sampled_from([b"st", b"op", b" ", b"\xe2\x82", b"\xac", "é".encode()])
    ),
    max_size=16,
)
_WORDS = st.lists(st.sampled_from(["stop", "top", "op ", "€", "é", "�", " s"]), max_size=3)


def assembler(
    pieces: list[bytes], words: list[str], *, min_tokens: int = 0, strip: bool = False
) -> TextAssembler:
    return TextAssembler(
        pieces.__getitem__,
        lambda _: False,
        strip_leading_space=strip,
        stop_words=words,
        min_tokens=min_tokens,
    )


def whole_answer(pieces: list[bytes], words: list[str], *, strip: bool) -> str:
    text = b"".join(pieces).decode("utf-8", "replace")
    if strip:
        text = text.removeprefix(" ")
    matcher = StopMatcher(words)
    shown, _ = matcher.push(text)
    return shown + matcher.finish()


@settings(max_examples=500, deadline=None)
@given(_PIECES, _WORDS, st.booleans())
def test_joined_deltas_equal_the_answer_made_at_once(
    pieces: list[bytes], words: list[str], strip: bool
) -> None:
    stream = assembler(pieces, words, strip=strip)
    shown = ""
    for token_id in range(len(pieces)):
        delta, stopped = stream.push(token_id)
        shown += delta
        if stopped:
            break
    assert shown + stream.finish() == whole_answer(pieces, words, strip=strip)


@settings(max_examples=200, deadline=None)
@given(_PIECES, _WORDS)
def test_pushing_many_tokens_equals_pushing_one_by_one(pieces: list[bytes], words: list[str]) -> None:
    one, many = assembler(pieces, words), assembler(pieces, words)
    text = "".join(one.push(token_id).text for token_id in range(len(pieces)))
    delta, count = many.extend(range(len(pieces)))
    assert delta == (text, one.stopped)
    assert many.token_ids == one.token_ids == tuple(range(count))
    assert one.finish() == many.finish()


def test_tokens_behind_the_one_that_completes_a_stop_string_do_not_belong() -> None:
    stream = assembler([b"say ", b"st", b"op it", b"later"], ["stop"])
    delta, count = stream.extend([0, 1, 2, 3])
    assert delta == ("say ", True)
    assert count == 3
    assert stream.token_ids == (0, 1, 2)
    assert stream.finish() == ""


def test_a_stop_string_may_end_in_the_middle_of_a_character_sequence() -> None:
    stream = assembler(["x€".encode()[:2], "x€".encode()[2:] + b"y"], ["€"])
    assert stream.push(0) == ("x", False)
    assert stream.push(1) == ("", True)


def test_stop_strings_wait_for_min_tokens() -> None:
    pieces = [b"stop ", b"go ", b"stop"]
    stream = assembler(pieces, ["stop"], min_tokens=1)
    assert stream.extend([0, 1, 2]) == (("stop go ", True), 3)
    assert assembler(pieces, ["stop"]).extend([0, 1, 2]) == (("", True), 1)
