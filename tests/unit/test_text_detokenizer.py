"""Laws of the incremental detokenizer."""

from __future__ import annotations

from dspark.text.detokenizer import IncrementalDetokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

# Bytes that make whole, broken, overlong and surrogate sequences likely.
_AWKWARD = st.sampled_from(
    [b"a", b" ", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98", b"\x80", b"\xed\xa0"]
)
_TOKENS = st.lists(
    st.one_of(_AWKWARD, st.binary(max_size=5), st.text(max_size=3).map(str.encode)), max_size=20
)


def detokenizer(
    pieces: list[bytes], *, special: frozenset[int] = frozenset(), strip: bool = False
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(pieces.__getitem__, special.__contains__, strip_leading_space=strip)


@settings(max_examples=300, deadline=None)
@given(_TOKENS)
def test_joined_pieces_equal_the_whole_text(pieces: list[bytes]) -> None:
    stream = detokenizer(pieces)
    text = "".join(stream.push(i) for i in range(len(pieces))) + stream.finish()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=20))
def test_no_piece_of_valid_text_ends_in_half_a_character(text: str) -> None:
    pieces = [bytes([byte]) for byte in text.encode()]
    stream = detokenizer(pieces)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


def test_special_tokens_never_show_and_do_not_break_a_character() -> None:
    stream = detokenizer([b"\xe2\x82", b"<|im_end|>", b"\xac"], special=frozenset({1}))
    assert [stream.push(i) for i in range(3)] == ["", "", "€"]


def test_only_the_first_space_of_the_text_is_stripped() -> None:
    pieces = [b"", b"  two", b" three"]
    stream = detokenizer(pieces, strip=True)
    assert [stream.push(i) for i in range(3)] == ["", " two", " three"]
    assert detokenizer(pieces).push(1) == "  two"


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    stream = detokenizer([b"ok\xf0\x9f\x98"])
    assert stream.push(0) == "ok"
    assert stream.finish() == "�"
