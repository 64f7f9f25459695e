"""The gateway in front of a real server, asked by OpenAI's own client."""

import http.client
import json
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from dspark.serving.gateway_process import GatewayProcess
from support.server import ask, command, until, until_idle

pytestmark = pytest.mark.server

HI = [{"role": "user", "content": "The quick brown fox"}]
GREEDY = {"model": "dspark", "temperature": 0.0}
NO_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def gateway(running_server, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = GatewayProcess(
        grpc_url=running_server.grpc_url,
        host="127.0.0.1",
        port=port,
        model_name="dspark",
        log_file=tmp_path_factory.mktemp("gateway") / "log",
        drain_timeout_s=5.0,
    )
    process.start()
    yield process
    process.stop()
    assert process.poll() is not None
    assert "Traceback" not in process.log_file.read_text(), process.log_file.read_text()


@pytest.fixture
def client(gateway, server):  # noqa: ARG001  (server checks that every page is back)
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["dspark"]
    assert client.models.retrieve("dspark").owned_by == "dspark"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.code == "model_not_found"


def test_a_chat_completion_is_the_models_own_answer(client, server):
    made = client.chat.completions.create(messages=HI, max_tokens=12, extra_body=NO_END, **GREEDY)
    expected = ask(server, messages=json.dumps(HI), max_tokens=12, temperature=0.0, ignore_eos=True)
    (choice,) = made.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert made.usage.completion_tokens == 12
    assert made.usage.total_tokens == made.usage.prompt_tokens + 12 and made.usage.prompt_tokens > 5
    assert made.model == "dspark" and made.object == "chat.completion"


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_chunks_joined_are_the_whole_answer(client, n):
    given = {"messages": HI, "max_tokens": 20, "seed": 4, "n": n, "model": "dspark", "extra_body": NO_END}
    whole = client.chat.completions.create(**given)
    texts, reasons, usage = [""] * n, [None] * n, None
    for chunk in client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * n
    assert usage == whole.usage and usage.completion_tokens == 20 * n
    assert len(set(texts)) == n, "each choice has a seed of its own"


def test_a_seed_decides_the_answer(client):
    given = {"model": "dspark", "prompt": "x", "max_tokens": 20, "extra_body": NO_END}
    answers = [client.completions.create(**given, seed=seed).choices[0].text for seed in (5, 5, -5)]
    assert answers[0] == answers[1] != answers[2]


def test_completions_take_every_form_of_prompt(client, server):
    one = client.completions.create(prompt="aaa", max_tokens=6, **GREEDY, extra_body=NO_END)
    assert one.object == "text_completion" and one.usage.completion_tokens == 6
    two = client.completions.create(prompt=["aaa", "bbb"], max_tokens=6, **GREEDY, extra_body=NO_END)
    assert two.choices[0].text == one.choices[0].text and [c.index for c in two.choices] == [0, 1]
    ids = client.completions.create(prompt=[5, 6, 7], max_tokens=6, **GREEDY, extra_body=NO_END)
    assert (
        ids.choices[0].text
        == ask(server, input_ids=[5, 6, 7], max_tokens=6, temperature=0.0, ignore_eos=True).text
    )
    lists = client.completions.create(prompt=[[5, 6, 7], [8]], max_tokens=6, **GREEDY, extra_body=NO_END)
    assert lists.choices[0].text == ids.choices[0].text and lists.usage.prompt_tokens == 4
    echoed = client.completions.create(prompt="aaa", max_tokens=6, echo=True, **GREEDY, extra_body=NO_END)
    assert echoed.choices[0].text == "aaa" + one.choices[0].text
    assert client.completions.create(prompt="a", **GREEDY, extra_body=NO_END).usage.completion_tokens == 16


def test_stop_ends_the_answer_before_its_text(client):
    given = {"messages": HI, "max_tokens": 40, "extra_body": NO_END, **GREEDY}
    whole = client.chat.completions.create(**given).choices[0].message.content
    word = whole[10:13]
    for stop in (word, [word, "never there"]):
        choice = client.chat.completions.create(**given, stop=stop).choices[0]
        assert choice.message.content == whole[: whole.index(word)] and choice.finish_reason == "stop"


def test_log_probabilities_stand_by_their_tokens(client):
    given = {"messages": HI, "max_tokens": 9, "extra_body": NO_END, **GREEDY}
    choice = client.chat.completions.create(**given, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 9
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace") == choice.message.content
    for one in content:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob <= 0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**given, logprobs=True, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content])
    assert all(one.top_logprobs == [] for one in streamed)
    old = client.completions.create(prompt="aaa", max_tokens=5, logprobs=2, **GREEDY, extra_body=NO_END)
    figures = old.choices[0].logprobs
    assert len(figures.tokens) == len(figures.token_logprobs) == len(figures.text_offset) == 5
    assert figures.text_offset[0] == 0 and all(1 <= len(top) <= 2 for top in figures.top_logprobs)


SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog"]},
        "legs": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_response_formats_are_followed(client, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    made = client.chat.completions.create(
        model="dspark", messages=HI, response_format=wanted, max_tokens=100, seed=1, stream=stream
    )
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in made)
        if stream
        else made.choices[0].message.content
    )
    answer = json.loads(text)
    assert answer["animal"] in ("fox", "dog") and 0 <= answer["legs"] <= 9


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(client, choice, stream):
    made = client.chat.completions.create(
        model="dspark", messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=100, seed=2, stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in made]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        reason = chunks[-1].finish_reason
    else:
        (call,), reason = made.choices[0].message.tool_calls, made.choices[0].finish_reason
    assert call.function.name == "look_up" and reason == "tool_calls"
    assert json.loads(call.function.arguments)["animal"] in ("fox", "dog")


REFUSED = [
    ({"temperature": -1}, "temperature"), ({"top_p": 3}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"), ({"n": 100}, "n"), ({"stop": 5}, "stop"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"), ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"colour": "red"}, "colour"), ({"top_logprobs": 3}, "top_logprobs"), ({"seed": "x"}, "seed"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"stream_options": {}, "n": 2.5}, "n"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"), ({"presence_penalty": 5}, "presence_penalty"),
    ({"max_tokens": 10**6}, "max_tokens"), ({"frequency_penalty": "x"}, "frequency_penalty"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_errors_come_in_openais_shape_and_name_the_field(client, stream):
    for given, param in REFUSED:
        body = {"model": "dspark", "messages": HI, "stream": stream, **given}
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/chat/completions", body=body, cast_to=object)
        error = caught.value.body
        assert error["param"] == param, (given, error)
        assert error["type"] == "invalid_request_error" and error["message"]


def test_other_models_other_paths_and_broken_bodies_are_refused(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HI)
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="dspark", input="x")
    assert "no such endpoint" in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError):
        client.post("/completions", body=[1], cast_to=object)
    for body in (b"{", b"\xff\xfe", b'{"model": "dspark", "prompt": "\\ud800"}', b"[" * 100_000, b""):
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(
                urllib.request.Request(f"{client.base_url}completions", data=body), timeout=60
            )
        with answer.value as error:
            assert error.code == 400 and json.loads(error.read())["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(client, gateway, server, stream):
    cancelled = command(server, "slow")["num_cancelled"]
    given = {"messages": HI, "max_tokens": 3000, **NO_END, **GREEDY}
    if stream:
        made = client.chat.completions.create(
            messages=HI, max_tokens=3000, extra_body=NO_END, stream=True, **GREEDY
        )
        next(iter(made))
        made.close()
    else:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(given))
        until(lambda: command(server, "stats")["num_running"] == 1)
        connection.close()
    until(lambda: command(server, "stats")["num_cancelled"] == cancelled + 1)
    until_idle(server)


def test_a_reader_that_never_reads_holds_nobody_up_and_can_be_left(client, gateway, server):
    """Its answer is larger than what sockets hold, so the gateway has to wait with it, and with it alone."""
    body = {
        "messages": HI,
        "max_tokens": 3000,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        **NO_END,
        **GREEDY,
    }
    text = json.dumps(body).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(60)
        deaf.connect(("127.0.0.1", gateway.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        deaf.sendall(head.encode() + text)
        until_idle(server)  # the engine is through with it
        alone = ask(server, messages=json.dumps(HI), max_tokens=12, temperature=0.0, ignore_eos=True)
        made = client.chat.completions.create(messages=HI, max_tokens=12, extra_body=NO_END, **GREEDY)
        assert made.choices[0].message.content == alone.text
    assert client.models.list().data


def test_eight_clients_at_once(client):
    def one(index):
        made = client.chat.completions.create(
            model="dspark", messages=HI, max_tokens=20, seed=index, stream=index % 2 == 0, extra_body=NO_END
        )
        if index % 2:
            return made.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in made)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    assert together[:2] == [one(0), one(1)] and len(set(together)) == 8


def test_a_model_that_cannot_be_reached_is_unavailable(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = GatewayProcess(
        grpc_url="127.0.0.1:1",
        host="127.0.0.1",
        port=port,
        model_name="m",
        log_file=tmp_path / "log",
        drain_timeout_s=1.0,
    )
    process.start()
    try:
        with openai.OpenAI(base_url=process.url, api_key="none", max_retries=0, timeout=60) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="m", prompt="x")
            assert caught.value.status_code == 503
    finally:
        process.stop()
