"""What the client prints."""

import pytest
from dspark_client.connection import Answer, Delta
from dspark_client.terminal import remark, show_stream, summary, table


class Generated:
    """A generation that yields texts, then raises `error`; `closed` tells whether its iterator was ended."""

    def __init__(self, *texts, error=None):
        self.answer, self.texts, self.error, self.closed = Answer(), texts, error, False

    def __iter__(self):
        try:
            for text in self.texts:
                self.answer.text += text
                yield Delta(text, (1,))
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_a_stream_is_printed_as_it_is_and_ends_the_line(capsys):
    assert show_stream(Generated("  Hé", "llo", "")).text == "  Héllo"
    assert capsys.readouterr().out == "  Héllo\n"
    show_stream(Generated("done\n"))
    assert capsys.readouterr().out == "done\n"


def test_an_error_before_the_first_text_leaves_standard_output_empty(capsys):
    with pytest.raises(ValueError, match="refused"):
        show_stream(Generated(error=ValueError("refused")))
    assert capsys.readouterr().out == ""


def test_ctrl_c_while_printing_ends_the_request(monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    generation = Generated("a", "b")
    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        show_stream(generation)
    assert generation.closed


def test_the_summary_names_accepted_length_only_where_drafts_were_verified():
    answer = Answer(output_ids=[1] * 5, tokens_per_second=12.34, first_token_s=0.05, finish_reason="length")
    assert summary(answer) == "[5 tokens, 12.3 tokens/s, first after 50 ms, ended by length]"
    answer.metrics = {"num_draft_tokens": 4, "mean_acceptance_length": 2.5}
    answer.finish_reason = "stop"
    assert summary(answer) == "[5 tokens, 12.3 tokens/s, first after 50 ms, accepted length 2.50]"


def test_a_table_lines_up():
    assert table(("a", "bb"), [("long", "1"), ("x", "22")]) == "a     bb\n----  --\nlong   1\nx     22"


def test_remarks_go_to_standard_error_without_colour_where_there_is_no_terminal(capsys):
    remark("hello")
    assert capsys.readouterr() == ("", "hello\n")
