"""Requests as clients of other Triton models send them, tensor by tensor, and what those clients read back."""

import json
import queue
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from support.server import ask, command, until

pytestmark = pytest.mark.server


def prepared(name, array):
    kind = {"O": "BYTES", "b": "BOOL", "f": "FP32", "i": "INT32", "u": "UINT64"}[array.dtype.kind]
    made = grpc_client.InferInput(name, array.shape, kind)
    made.set_data_from_numpy(array)
    return made


def sent(server, arrays, *, outputs, parameters=None, request_id="1", model="dspark"):
    """Send as both clients do: start the stream, send, stop the stream, read what came."""
    received = queue.Queue()
    client = grpc_client.InferenceServerClient(server.grpc_url)
    client.start_stream(callback=lambda result, error: received.put(error or result), stream_timeout=60)
    client.async_stream_infer(
        model,
        [prepared(name, array) for name, array in arrays.items()],
        outputs=[grpc_client.InferRequestedOutput(name) for name in outputs],
        request_id=request_id,
        parameters=parameters,
    )
    client.stop_stream()
    client.close()
    results = []
    while not received.empty():
        results.append(received.get())
    return results


TENSORRT_LLM = {  # what end_to_end_grpc_client.py of the TensorRT-LLM backend sends, all options given
    "text_input": np.array([["The quick brown fox"]], dtype=object),
    "max_tokens": np.array([[16]], dtype=np.int32),
    "beam_width": np.array([[1]], dtype=np.int32),
    "temperature": np.array([[0.0]], dtype=np.float32),
    "num_return_sequences": np.array([[1]], dtype=np.int32),
    "bad_words": np.array([[""]], dtype=object),
    "stop_words": np.array([[""]], dtype=object),
    "repetition_penalty": np.array([[1.0]], dtype=np.float32),
    "presence_penalty": np.array([[0.0]], dtype=np.float32),
    "frequency_penalty": np.array([[0.0]], dtype=np.float32),
    "return_log_probs": np.array([[True]], dtype=bool),
    "return_context_logits": np.array([[False]], dtype=bool),
    "return_generation_logits": np.array([[False]], dtype=bool),
    "return_perf_metrics": np.array([[True]], dtype=bool),
    "end_id": np.array([[-1]], dtype=np.int32),
    "pad_id": np.array([[2]], dtype=np.int32),
    "exclude_input_in_output": np.array([[True]], dtype=bool),
}
TENSORRT_LLM_OUTPUTS = [
    "text_output", "cum_log_probs", "output_log_probs", "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks", "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns",
    "last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_tensorrt_llm_grpc(server, stream):
    arrays = {**TENSORRT_LLM, "stream": np.array([[stream]], dtype=bool)}
    results = sent(server, arrays, outputs=TENSORRT_LLM_OUTPUTS)
    texts = [result.as_numpy("text_output")[0].decode("utf-8") for result in results]
    expected = ask(server, text_input="The quick brown fox", max_tokens=16, temperature=0.0, end_id=-1)
    assert "".join(texts) == expected.text
    log_probs = np.concatenate([result.as_numpy("output_log_probs")[0] for result in results])
    assert len(log_probs) == 16 and (log_probs <= 0).all()
    last = results[-1]
    assert last.as_numpy("cum_log_probs")[0] == pytest.approx(log_probs.sum(), rel=1e-4)
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [int(last.as_numpy(name)[0]) for name in names]
    assert times == sorted(times) and 0 < times[-1] - times[0] < 60e9
    pages = [
        int(last.as_numpy(f"kv_cache_{name}_blocks")[0]) for name in ("alloc_total", "alloc_new", "reused")
    ]
    assert pages[0] == pages[1] + pages[2] >= 2
    drafted, accepted = (int(last.as_numpy(f"total_{n}_tokens")[0]) for n in ("draft", "accepted_draft"))
    assert last.as_numpy("acceptance_rate")[0] == pytest.approx(accepted / drafted)


def test_tensorrt_llm_guided_decoding_grpc(server):
    arrays = {
        **TENSORRT_LLM,
        "stream": np.array([[False]], dtype=bool),
        "guided_decoding_guide_type": np.array([["regex"]]).astype(object),
        "guided_decoding_guide": np.array([["(yes|no)!"]]).astype(object),
    }
    (result,) = sent(server, arrays, outputs=["text_output"])
    assert result.as_numpy("text_output")[0] in (b"yes!", b"no!")


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": "machine learning", "max_tokens": 8, "bad_words": "", "stop_words": ""},
        {
            "text_input": "machine learning",
            "max_tokens": 8,
            "bad_words": "",
            "stop_words": "",
            "pad_id": 2,
            "end_id": 2,
        },
        {
            "text_input": "machine learning",
            "parameters": {"max_tokens": 8, "bad_words": [""], "stop_words": [""]},
        },
    ],
)
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_tensorrt_llm_http(server, path, body):
    events = posted(server, path, {**body, "stream": path == "generate_stream"})
    assert all(event["model_name"] == "dspark" for event in events)
    assert "".join(event["text_output"] for event in events)


# Every input of the ensemble that a text model without adapters can take, as its config.pbtxt names them.
ENSEMBLE = {
    **TENSORRT_LLM,
    "stream": np.array([[True]], dtype=bool),
    "top_k": np.array([[0]], dtype=np.int32),
    "top_p": np.array([[1.0]], dtype=np.float32),
    "length_penalty": np.array([[1.0]], dtype=np.float32),
    "min_length": np.array([[3]], dtype=np.int32),
    "random_seed": np.array([[9]], dtype=np.uint64),
    "num_draft_tokens": np.array([[2]], dtype=np.int32),
    "use_draft_logits": np.array([[False]], dtype=bool),
}


def test_every_input_of_tensorrt_llms_ensemble_grpc(server):
    results = sent(server, ENSEMBLE, outputs=TENSORRT_LLM_OUTPUTS)
    texts = [result.as_numpy("text_output")[0].decode("utf-8") for result in results]
    expected = ask(server, text_input="The quick brown fox", max_tokens=16, temperature=0.0, end_id=-1)
    assert "".join(texts) == expected.text


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_every_input_of_tensorrt_llms_ensemble_http(server, path):
    body = {name: array.ravel().tolist()[0] for name, array in ENSEMBLE.items()}
    body["stream"] = path == "generate_stream"
    events = posted(server, path, body)
    expected = ask(server, text_input="The quick brown fox", max_tokens=16, temperature=0.0, end_id=-1)
    assert "".join(event["text_output"] for event in events) == expected.text
    assert events[-1]["cum_log_probs"] < 0


def test_what_only_other_models_have_is_refused_by_name(server):
    """Adapters, pictures, embeddings: Triton knows the inputs that are declared, and no others."""
    arrays = {
        "text_input": np.array([["hi"]], dtype=object),
        "lora_task_id": np.array([[1]], dtype=np.uint64),
    }
    (error,) = sent(server, arrays, outputs=["text_output"])
    assert "unexpected inference input 'lora_task_id'" in str(error)


VLLM = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "12", "seed": 7}


@pytest.mark.parametrize("model", ["vllm_model", "dspark"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_vllm_grpc(server, stream, as_tensor, model):
    """The published client as it is, to the model it names; with a batch dimension to the one that has it."""
    arrays = {
        "text_input": np.array([b"Hello, my name is"], dtype=np.object_),
        "stream": np.array([stream], dtype=bool),
        "exclude_input_in_output": np.array([True], dtype=bool),
    }
    if as_tensor:
        arrays["sampling_parameters"] = np.array([json.dumps(VLLM).encode()], dtype=np.object_)
    if model == "dspark":
        arrays = {name: array[None] for name, array in arrays.items()}
    results = sent(server, arrays, outputs=["text_output"], parameters=VLLM, request_id="17", model=model)
    assert {result.get_response().id for result in results} == {"17"}
    text = b"".join(part for result in results for part in result.as_numpy("text_output")).decode()
    expected = ask(server, text_input="Hello, my name is", temperature=0.1, top_p=0.95, max_tokens=12, seed=7)
    assert text == expected.text


def test_each_model_refuses_the_other_ones_shape_and_says_what_it_expects(server):
    """Triton compares the number of dimensions before any model sees a request."""
    arrays = {
        "text_input": np.array([b"Hello, my name is"], dtype=np.object_),
        "stream": np.array([True], dtype=bool),
    }
    (error,) = sent(server, arrays, outputs=["text_output"], parameters=VLLM)
    assert "unexpected shape for input" in str(error) and "Expected [-1,1]" in str(error)
    batched = {name: array[None] for name, array in arrays.items()}
    (error,) = sent(server, batched, outputs=["text_output"], parameters=VLLM, model="vllm_model")
    assert "unexpected shape for input" in str(error) and "Expected [1]" in str(error)


@pytest.mark.parametrize("model", ["vllm_model", "dspark"])
def test_vllm_additional_outputs_grpc(server, model):
    flags = (
        "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens",
    )  # fmt: skip
    arrays = {
        "text_input": np.array([b"example prompt"], dtype=np.object_),
        **{f"return_{name}": np.array([True], dtype=bool) for name in flags},
        "sampling_parameters": np.array(
            [b'{"logprobs": 2, "max_tokens": 5, "temperature": 0}'], dtype=np.object_
        ),
    }
    if model == "dspark":
        arrays = {name: array[None] for name, array in arrays.items()}
    (result,) = sent(server, arrays, outputs=["text_output", *flags], model=model)
    rows = json.loads(result.as_numpy("logprobs")[0])
    assert len(rows) == result.as_numpy("num_output_tokens")[0] == 5
    for row in rows:
        first = next(iter(row.values()))
        assert set(first) == {"logprob", "rank", "decoded_token", "bytes"} and first["rank"] == 1
        assert 2 <= len(row) <= 3
    total = sum(next(iter(row.values()))["logprob"] for row in rows)
    assert result.as_numpy("cumulative_logprob")[0] == pytest.approx(total, rel=1e-4)
    assert result.as_numpy("finish_reason")[0] == b"length"


def test_vllm_many_streams_at_once_keep_the_order_of_their_answers(server):
    """Triton hands responses of an ensemble on by a pool of threads."""
    asked = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
    arrays = {
        "text_input": np.array([b"in order"], dtype=np.object_),
        "stream": np.array([True], dtype=bool),
        "sampling_parameters": np.array([json.dumps(asked).encode()], dtype=np.object_),
    }
    expected = ask(server, text_input="in order", temperature=0.0, max_tokens=300, ignore_eos=True).text

    def one(_index):
        results = sent(server, arrays, outputs=["text_output"], model="vllm_model")
        return len(results), b"".join(result.as_numpy("text_output")[0] for result in results).decode()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(16)))
    assert {text for _, text in answers} == {expected} and min(count for count, _ in answers) > 2


@pytest.mark.parametrize("as_tensor", [False, True])
def test_vllm_errors_and_stops_grpc(server, as_tensor):
    """A refusal says why through the model without a batch dimension, too, and a stop reaches what runs there."""
    arrays = {"text_input": np.array([b"x"], dtype=np.object_), "stream": np.array([True], dtype=bool)}
    bad = {"temperature": -1}
    tensors = {"sampling_parameters": np.array([json.dumps(bad).encode()], dtype=np.object_)}
    given = {**arrays, **tensors} if as_tensor else arrays
    (error,) = sent(server, given, outputs=["text_output"], parameters=bad, model="vllm_model")
    assert "[INVALID_ARG] temperature: got -1" in str(error)
    cancelled = command(server, "slow")["num_cancelled"]
    endless = {"max_tokens": 3000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            sent,
            server,
            arrays,
            outputs=["text_output"],
            parameters=endless,
            request_id="18",
            model="vllm_model",
        )
        until(lambda: command(server, "stats")["num_running"] == 1)
        ask(server, request_id="18", stop=True)
        assert running.result(60)
    assert command(server, "stats")["num_cancelled"] == cancelled + 1


@pytest.mark.parametrize("model", ["vllm_model", "dspark"])
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_vllm_http(server, path, model):
    body = {
        "text_input": "What is Triton?",
        "stream": path == "generate_stream",
        "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 9}),
        "exclude_input_in_output": True,
    }
    as_parameters = {
        "text_input": "What is Triton?",
        "parameters": {"stream": path == "generate_stream", "temperature": 0, "max_tokens": 9},
    }
    expected = ask(server, text_input="What is Triton?", temperature=0.0, max_tokens=9).text
    for form in (body, as_parameters):
        events = posted(server, path, form, model=model)
        assert "".join(event["text_output"] for event in events) == expected


def posted(server, path, body, model="dspark"):
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{model}/{path}", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    if path == "generate":
        return [json.loads(text)]
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
