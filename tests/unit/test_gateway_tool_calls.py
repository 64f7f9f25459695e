"""Tool calls in streamed text: found however the text is cut, and nothing of it lost."""

import itertools
import json

import pytest
from dspark.gateway.tool_calls import ToolCallFinder, tool_call
from hypothesis import given
from hypothesis import strategies as st

TEXT = (
    'I look. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and '
    '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
)


def found(pieces):
    finder, shown, calls = ToolCallFinder(), "", []
    for piece in pieces:
        text, more = finder.push(piece)
        shown, calls = shown + text, calls + more
    return shown + finder.finish(), calls


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_calls_are_found_however_the_text_is_cut(cuts):
    marks = [0, *sorted(cuts), len(TEXT)]
    shown, calls = found([TEXT[a:b] for a, b in itertools.pairwise(marks)])
    assert shown == "I look.  and "
    assert [call["function"]["name"] for call in calls] == ["add", "sub"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
    assert len({call["id"] for call in calls}) == 2


@given(st.text(alphabet="<>/tool_caxy{}", max_size=60), st.integers(1, 5))
def test_text_without_a_readable_call_comes_back_whole(text, size):
    shown, calls = found([text[i : i + size] for i in range(0, len(text), size)])
    assert (shown, calls) == (text, [])


def test_text_is_shown_as_soon_as_it_cannot_become_a_call():
    finder = ToolCallFinder()
    assert finder.push("a <too")[0] == "a "
    assert finder.push("th")[0] == "<tooth"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}', '{"arguments": {}}', "[" * 100_000])
def test_what_is_no_call_is_none(text):
    assert tool_call(text) is None


def test_arguments_may_be_called_parameters_and_may_be_text():
    assert tool_call('{"name": "f", "parameters": {"x": 1}}')["function"]["arguments"] == '{"x": 1}'
    assert tool_call('{"name": "f", "arguments": "{}"}')["function"]["arguments"] == "{}"
    assert tool_call('{"name": "f"}')["function"]["arguments"] == "{}"
