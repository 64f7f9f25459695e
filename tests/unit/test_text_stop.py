"""Laws of the stop-string matcher."""

from __future__ import annotations

from dspark.text.stop import StopMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

_WORDS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=4)
_PIECES = st.lists(st.text("abé", max_size=4), max_size=12)


def naive_cut(text: str, words: list[str]) -> tuple[str, bool]:
    """The stop string complete first, the longest of those; by trying every end."""
    for end in range(len(text) + 1):
        ending = [len(word) for word in words if text[:end].endswith(word)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(_WORDS, _PIECES)
def test_streamed_text_equals_the_text_cut_at_once(words: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(words)
    shown = "".join(matcher.push(piece)[0] for piece in pieces)
    expected, stopped = naive_cut("".join(pieces), words)
    assert matcher.matched is stopped
    assert shown + matcher.finish() == expected


@settings(max_examples=300, deadline=None)
@given(_WORDS, _PIECES)
def test_what_is_shown_can_never_become_part_of_a_stop_string(words: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(words)
    shown, read = "", ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown, read = shown + text, read + piece
        if stopped:
            break
        held = read[len(shown) :]
        # Exactly the longest suffix that some stop string begins with is held, no less and no more.
        suffixes = [read[i:] for i in range(len(read) + 1)]
        assert held == next(s for s in suffixes if any(word.startswith(s) for word in words) or s == "")


def test_nothing_is_shown_behind_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("answer EN") == ("answer ", False)
    assert matcher.push("D more") == ("", True)
    assert matcher.push("even more") == ("", True)
    assert matcher.finish() == ""


def test_a_long_near_miss_costs_linear_time() -> None:
    matcher = StopMatcher(["a" * 200 + "b", "aab" * 60])
    text = "a" * 20_000
    shown = "".join(matcher.push(char)[0] for char in text)
    assert len(shown) == len(text) - 200
    assert shown + matcher.finish() == text
