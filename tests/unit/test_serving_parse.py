"""Parsing of requests: precedence, spellings, and what is refused."""

import json

import numpy as np
import pytest
from dspark.errors import RequestError
from dspark.serving.chat import parse_messages
from dspark.serving.contract import OUTPUTS
from dspark.serving.parse import ModelLimits, parse_request
from support.fake_engine import ByteCodec

LIMITS = ModelLimits(vocab_size=256, max_context_len=64)
ALL = [spec.name for spec in OUTPUTS]


def text(*words):
    return np.array([[word if isinstance(word, bytes) else word.encode() for word in words]], dtype=object)


def parse(tensors=None, parameters=None, *, prompt=True, outputs=ALL, tokenizer=ByteCodec(), **sampling):  # noqa: B008
    tensors = dict(tensors or {})
    if prompt and not {"text_input", "input_ids", "messages"} & set(tensors):
        tensors["text_input"] = text("hello")
    if sampling:
        tensors["sampling_parameters"] = text(json.dumps(sampling))
    return parse_request(
        tensors, parameters or {}, requested_outputs=outputs, tokenizer=tokenizer, limits=LIMITS
    )


def refusal(*args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*args, **kwargs)
    return caught.value


def test_defaults_are_the_contracts():
    parsed = parse()
    assert parsed.prompt_ids == tuple(b"hello")
    assert parsed.params.max_tokens == 64 - 5  # 256, but no more than the context leaves
    assert (parsed.params.temperature, parsed.params.seed, parsed.params.num_draft_tokens) == (1.0, None, -1)
    assert not parsed.stream and not parsed.cancels
    assert parsed.wanted == {"text_output", "output_ids"}


def test_tensor_wins_over_parameter_wins_over_json():
    tensors = {
        "top_k": np.array([[1]], np.int32),
        "sampling_parameters": text('{"top_k": 3, "top_p": 0.3, "min_p": 0.3}'),
    }
    params = parse(tensors, {"top_k": 2, "top_p": 0.2}).params
    assert (params.top_k, params.top_p, params.min_p) == (1, 0.2, 0.3)


def test_fp32_tensors_mean_the_decimal_that_was_written():
    tensors = {"temperature": np.array([[0.7]], np.float32)}
    assert parse(tensors).params.temperature == parse(temperature=0.7).params.temperature == 0.7


def test_numbers_and_truths_may_come_as_text():
    params = parse(temperature="0.1", top_k="5", ignore_eos="true", max_tokens=8.0).params
    assert (params.temperature, params.top_k, params.ignore_eos, params.max_tokens) == (0.1, 5, True, 8)


@pytest.mark.parametrize(("alias", "field"), [("streaming", "stream"), ("request_output_len", "max_tokens")])
def test_aliases_mean_their_field_and_must_agree_with_it(alias, field):
    dtype = np.bool_ if field == "stream" else np.int32
    one = {alias: np.array([[1]], dtype)}
    parsed = parse(one)
    assert (parsed.stream if field == "stream" else parsed.params.max_tokens) == 1
    other = {field: np.array([[0 if field == "stream" else 2]], dtype)}
    assert refusal({**one, **other}).field in (alias, field)


def test_stop_words_come_as_list_text_or_tensor():
    assert parse(stop=["a", "b"]).params.stop_words == ("a", "b")
    assert parse(stop="a").params.stop_words == ("a",)
    assert parse({"stop_words": text("a", "é")}).params.stop_words == ("a", "é")
    assert parse(None, {"stop_words": '["a", "b"]'}).params.stop_words == ("a", "b")
    assert parse({"stop_words": np.empty((1, 0), dtype=object)}).params.stop_words == ()


def test_stop_true_cancels_and_needs_no_prompt():
    assert parse({"stop": np.array([[True]])}, prompt=False).cancels
    assert not parse({"stop": np.array([[False]])}).cancels


def test_bad_words_are_spelled_with_and_without_a_space():
    assert parse({"bad_words": text("x")}).params.bad_words_ids == ((120,), (32, 120))


def test_every_form_of_prompt_becomes_token_ids():
    ids = np.array([[1, 2, 3]], np.int32)
    assert parse({"input_ids": ids}).prompt_ids == (1, 2, 3)
    assert parse(input_ids=[4, 5], prompt=False).prompt_ids == (4, 5)
    messages = [{"role": "user", "content": "hi"}]
    assert parse({"messages": text(json.dumps(messages))}).prompt_ids == tuple(b"<user>hi")
    assert parse(messages=messages, prompt=False).prompt_ids == tuple(b"<user>hi")
    assert parse(None, {"text_input": "x"}, prompt=False).prompt_ids == (120,)


def test_input_comes_back_in_front_only_when_asked_for():
    assert parse().echo_text is None
    off = {"exclude_input_in_output": np.array([[False]])}
    assert parse(off).echo_text == "hello"
    assert parse({**off, "input_ids": np.array([[104, 105]], np.int32)}).echo_text == "hi"


def test_flags_choose_outputs_unless_the_client_named_them():
    flags = {"return_num_input_tokens": np.array([[True]]), "return_perf_metrics": np.array([[True]])}
    assert parse(flags).wanted == {
        "text_output", "output_ids", "num_input_tokens", "acceptance_rate", "total_accepted_draft_tokens",
        "total_draft_tokens", "kv_cache_alloc_total_blocks", "kv_cache_alloc_new_blocks",
        "kv_cache_reused_blocks", "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns",
        "last_token_time_ns", "spec_decode_metrics",
    }  # fmt: skip
    assert parse(flags, outputs=["text_output", "finish_reason"]).wanted == {"text_output", "finish_reason"}


def test_unknown_request_parameters_are_left_alone_but_json_keys_refused_by_name():
    assert parse(None, {"x-request-header": "1", "binary_data_output": False}).prompt_ids
    error = refusal(temprature=1)
    assert (
        error.field == "sampling_parameters" and "'temprature'" in str(error) and "temperature" in str(error)
    )
    assert refusal(sampling_parameters="{}").field == "sampling_parameters"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", "warm"), ("temperature", float("nan")), ("temperature", True),
        ("top_k", -1), ("top_k", 1.5), ("top_k", 2**40), ("top_p", 0), ("top_p", 1.01),
        ("min_p", 1), ("min_p", -1), ("seed", -1), ("seed", 2**64),
        ("max_tokens", 0), ("max_tokens", 60), ("max_tokens", "many"),
        ("min_tokens", -1), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
        ("end_id", 256), ("end_id", -2), ("num_draft_tokens", -2), ("ignore_eos", "perhaps"), ("stream", 2),
        ("stop_words", ["", "a"]), ("stop_words", [1]), ("stop_words", {"a": 1}), ("bad_words", ["a", ""]),
        ("logprobs", -1), ("logprobs", 21), ("timeout_ms", -1), ("priority", "high"),
        ("beam_width", 2), ("num_return_sequences", 0), ("return_context_logits", True),
        ("return_generation_logits", True), ("n", 2), ("n", True), ("best_of", 3), ("use_beam_search", True),
        ("prompt_logprobs", 1), ("skip_special_tokens", False), ("stop_token_ids", "x"), ("stop_token_ids", [1.5]),
        ("guided_decoding_guide_type", "lark"), ("guided_decoding", {}), ("guided_decoding", "regex"),
        ("guided_decoding", {"json": {}, "regex": "a"}), ("guided_decoding", {"choice": []}),
        ("exclude_input_in_output", []), ("stop_words", ["\ud800"]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_naming_field_value_and_what_is_allowed(field, value):
    error = refusal(**{field: value})
    assert error.field == field
    assert str(error).startswith(f"{field}: got ") and ", allowed is " in str(error)


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({}, "text_input"),
        ({"text_input": text("a"), "messages": text("[]")}, "messages"),
        ({"text_input": text("")}, "text_input"),
        ({"text_input": text(b"\xff\xfe")}, "text_input"),
        ({"text_input": text("a" * 64)}, "text_input"),
        ({"text_input": text("a", "b")}, "text_input"),
        ({"text_input": np.array([b"a"], dtype=object)}, "text_input"),
        ({"input_ids": np.array([[1, 256]], np.int32)}, "input_ids"),
        ({"input_ids": np.array([[-1]], np.int32)}, "input_ids"),
        ({"input_ids": np.empty((1, 0), np.int32)}, "input_ids"),
        ({"input_ids": np.array([[1], [2]], np.int32)}, "input_ids"),
        ({"input_ids": np.zeros((1, 64), np.int32)}, "input_ids"),
        ({"messages": text("not json")}, "messages"),
        ({"messages": text("[" * 100_000)}, "messages"),
        ({"messages": text("[]")}, "messages"),
        ({"messages": text('{"role": "user"}')}, "messages"),
        ({"messages": text('[{"role": "user"}]')}, "messages"),
        ({"messages": text('[{"role": "user", "content": 1}]')}, "messages"),
        ({"messages": text('[{"role": "user", "content": [{"type": "image_url"}]}]')}, "messages"),
        ({"messages": text('[{"role": 1, "content": "a"}]')}, "messages"),
        ({"messages": text('[{"role": "user", "content": "a", "colour": "red"}]')}, "messages"),
        ({"messages": text('[{"role": "assistant", "tool_calls": [{"function": 1}]}]')}, "messages"),
        (
            {
                "messages": text(
                    '[{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]'
                )
            },
            "messages",
        ),
        ({"text_input": text("a"), "sampling_parameters": text("[1]")}, "sampling_parameters"),
        ({"text_input": text("a"), "sampling_parameters": text("{")}, "sampling_parameters"),
    ],
)
def test_a_bad_prompt_is_refused_naming_its_field(tensors, field):
    assert refusal(tensors, prompt=False).field == field


def test_min_tokens_may_not_pass_max_tokens():
    assert refusal(min_tokens=9, max_tokens=8).field == "min_tokens"


@pytest.mark.parametrize(
    ("given", "outputs", "alternatives"),
    [
        ({"return_log_probs": True}, {"cum_log_probs", "output_log_probs"}, 0),
        ({"return_cumulative_logprob": True}, {"cumulative_logprob"}, 0),
        ({"return_logprobs": True}, {"logprobs"}, 0),
        ({"logprobs": 3}, {"logprobs"}, 3),
        ({"logprobs": 3, "return_log_probs": True}, {"logprobs", "cum_log_probs", "output_log_probs"}, 3),
    ],
)
def test_log_probabilities_are_told_in_the_form_that_was_asked_for(given, outputs, alternatives):
    parsed = parse(**given)
    assert parsed.wanted == {"text_output", "output_ids", *outputs}
    assert parsed.params.wants_log_probs and parsed.params.logprobs == alternatives
    assert (parsed.token_bytes is not None) == ("logprobs" in outputs)
    assert not parse().params.wants_log_probs


def test_log_probability_outputs_named_by_the_client_need_no_flag():
    assert parse(outputs=["text_output", "cum_log_probs"]).params.wants_log_probs


def test_what_other_models_clients_send_is_taken_where_it_changes_nothing():
    parsed = parse(
        n=1, best_of=1, use_beam_search=False, early_stopping=True, skip_special_tokens=True, beam_width=1,
        num_return_sequences=1, pad_id=5, length_penalty=1.5, return_context_logits=False, random_seed=3,
        min_length=2, stop="", bad_words=[""], stop_token_ids=[7, 8], prompt_logprobs=None,
    )  # fmt: skip
    params = parsed.params
    assert (params.seed, params.min_tokens, params.stop_words, params.bad_words_ids) == (3, 2, (), ())
    assert params.stop_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("given", "kind", "guide"),
    [
        ({"guided_decoding_guide_type": "json"}, "json", None),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": {"type": "object"}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"guided_decoding": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"guided_decoding": '{"json": "{}", "regex": null}'}, "json_schema", "{}"),
        ({"guided_decoding": {"json_object": True}}, "json", None),
        ({"guided_decoding": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_decoding": {"choice": ["yes", "n.o"]}}, "regex", "(yes|n\\.o)"),
    ],
)
def test_a_guide_is_read_from_every_form(given, kind, guide):
    parsed = parse_request(
        {"text_input": text("a"), "sampling_parameters": text(json.dumps(given))},
        {},
        requested_outputs=ALL,
        tokenizer=ByteCodec(),
        limits=LIMITS,
    )
    params = parsed.params
    assert (params.guided_decoding_guide_type, params.guided_decoding_guide) == (kind, guide)
    assert params.alters_logits


def test_a_guide_needs_its_type_and_its_text_and_a_tokenizer():
    assert refusal(guided_decoding_guide="a").field == "guided_decoding_guide_type"
    assert refusal(guided_decoding_guide_type="regex").field == "guided_decoding_guide"
    ids = {"input_ids": np.array([[1]], np.int32)}
    assert "tokenizer" in str(refusal(ids, tokenizer=None, guided_decoding_guide_type="json"))


def test_tools_go_to_the_chat_template_with_the_messages():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]}]
    assert parse(messages=messages, tools=tools, prompt=False).prompt_ids == tuple(b"[add]<user>1+1")
    assert parse(messages=messages, tools=[], prompt=False).prompt_ids == tuple(b"<user>1+1")
    assert refusal(tools=tools).field == "tools"
    for bad in ("{", "{}", [{"type": "function"}], [{"function": {"name": "x"}}], [1]):
        assert refusal(messages=messages, tools=bad, prompt=False).field == "tools"


def test_tool_calls_come_with_their_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = parse_messages(
        json.dumps(
            [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ]
        )
    )
    assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[0]["content"] == "" and messages[1]["tool_call_id"] == "1"
    assert messages[0]["tool_calls"][0]["id"] == "1"


@pytest.mark.parametrize("tensors", [{}, {"messages": text('[{"role": "user", "content": "a"}]')}])
def test_text_needs_a_tokenizer(tensors):
    assert "input_ids" in str(refusal(tensors, tokenizer=None))


def test_stop_words_need_a_tokenizer():
    ids = {"input_ids": np.array([[1]], np.int32)}
    assert parse(ids, tokenizer=None).prompt_ids == (1,)
    assert refusal(ids, tokenizer=None, stop_words=["a"]).field == "stop_words"


def test_a_text_too_long_for_the_context_is_refused_before_it_is_tokenized():
    class Counting(ByteCodec):
        def encode(self, text, **_options):
            assert len(text) == 1, "tokenized"
            return [ord(text)]

    limits = ModelLimits.of(vocab_size=256, max_context_len=64, tokenizer=Counting())
    assert limits.longest_token_bytes == 1
    messages = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 25}]
    prompt = {"text_input": "x"}
    for given in (
        {"text_input": "é" * 33},
        {"messages": json.dumps(messages)},
        {**prompt, "bad_words": "x" * 65},
        {**prompt, "stop_words": "x" * 65},
    ):
        with pytest.raises(RequestError, match=r"a text of 6[56] bytes', allowed is at most 64 bytes"):
            parse_request(
                {name: np.array([[text.encode()]], dtype=object) for name, text in given.items()},
                {},
                requested_outputs=["text_output"],
                tokenizer=Counting(),
                limits=limits,
            )


def limits_of(**options):
    return ModelLimits.of(vocab_size=256, max_context_len=64, **options)


def test_a_chat_of_more_messages_than_fit_is_refused_before_it_is_rendered():
    class Chat(ByteCodec):
        """Eight bytes around every message, three around a tool's, and no two of a system in a row."""

        num_rendered = 0

        def apply_chat_template(self, messages, **_options):
            self.num_rendered += 1
            roles = [message["role"] for message in messages]
            if roles.count("system") > 1:
                raise RequestError("messages", roles, "one of the system")
            return [1] * sum(3 if role == "tool" else 8 for role in roles)

    codec = Chat()
    limits = limits_of(tokenizer=codec)
    assert limits.most_messages == 64 // 3
    codec.num_rendered = 0
    for roles, allowed in ((["user"] * 21, False), (["tool"] * 21, True), (["tool"] * 22, False)):
        given = json.dumps([{"role": role, "content": ""} for role in roles])
        fields = {"messages": np.array([[given.encode()]], dtype=object)}
        options = {"requested_outputs": ["text_output"], "tokenizer": codec, "limits": limits}
        if allowed:
            assert len(parse_request(fields, {}, **options).prompt_ids) == 63
        else:
            with pytest.raises(
                RequestError, match=r"messages: got 'a (chat of 22 messages|prompt of 168 tok)"
            ):
                parse_request(fields, {}, **options)
    assert codec.num_rendered == 2, "22 messages were rendered"
    assert limits_of(tokenizer=None).most_messages is None

    class Bare(ByteCodec):
        def apply_chat_template(self, messages, **_options):
            raise RequestError("messages", messages, "nothing: there is no chat template")

    assert limits_of(tokenizer=Bare()).most_messages == 64


@pytest.mark.parametrize("field", ["tools", "messages"])
def test_tools_and_their_calls_are_measured_before_they_are_rendered(field):
    function = {"name": "x" * 65, "arguments": {}}
    message = {"role": "assistant", "content": ""}
    if field == "messages":
        message["tool_calls"] = [{"type": "function", "function": function}]
    given = {"messages": json.dumps([message])}
    if field == "tools":
        given["tools"] = json.dumps([{"type": "function", "function": function}])
    with pytest.raises(RequestError, match=rf"^{field}: got 'a text of \d+ bytes'"):
        parse_request(
            {name: np.array([[text.encode()]], dtype=object) for name, text in given.items()},
            {},
            requested_outputs=["text_output"],
            tokenizer=ByteCodec(),
            limits=limits_of(tokenizer=ByteCodec()),
        )
