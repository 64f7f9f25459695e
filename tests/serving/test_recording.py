"""What a real server keeps of its traffic is what its clients were sent, and no more than may be learnt from."""

import json
import socket
import stat
import urllib.request

import pytest
from dspark.models.loading import load_target
from dspark.serving.gateway_process import GatewayProcess
from support.server import Ask, ask, command, until

pytestmark = pytest.mark.server

OWN = {"max_tokens": 30, "ignore_eos": True}


def prompt(number):
    """Return a prompt that no other test has."""
    return [40, 41, 42, 43, 40, 41, 42, 50 + number]


def kept(folder):
    """Return (number of the prompt, temperature, answer) of this file's prompts, and the heads of all files."""
    found, heads = [], []
    for path in sorted(folder.glob("traffic-*.jsonl")):
        whole = path.read_text().split("\n")[:-1]  # what is behind the last end of a line is being written
        heads += [json.loads(line) for line in whole[:1]]
        for line in map(json.loads, whole[1:]):
            if line["prompt_ids"][:-1] == prompt(0)[:-1]:
                found.append((line["prompt_ids"][-1] - 50, line["temperature"], line["output_ids"]))
    return found, heads


def wait_for(folder, number):
    """Answers are written in the order of their ends: once this one is there, all before it are."""
    until(lambda: any(found[0] == number for found in kept(folder)[0]))


def test_answers_are_kept_as_they_were_sent_and_altered_ones_are_not(server, recorded, repository):
    own = {
        0: {"temperature": 0.0, "stream": True, **OWN},
        1: {"temperature": 0.75, "seed": 5, **OWN},
        2: {"temperature": 0.75, "seed": 6, "stream": True, **OWN},
        3: {"temperature": 0.0, **OWN, "max_tokens": 2},
    }
    told = []
    for number, sampling in own.items():
        reply = ask(server, input_ids=prompt(number), **sampling)
        told.append((number, sampling["temperature"], reply.ids))
    end_id = told[2][2][20]  # the same answer again, up to a token that ends it
    ended = ask(server, input_ids=prompt(2), **{**own[2], "ignore_eos": False}, end_id=end_id).ids
    assert ended[-1] == end_id and 2 <= len(ended) <= 21
    told.append((2, 0.75, ended))
    left_out = [
        {**own[0], "max_tokens": 1},
        {**own[0], "repetition_penalty": 1.2},
        {**own[0], "min_tokens": 3},
        {**own[0], "bad_words": ["zz"]},
        {"temperature": 0.0, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]{3,9}"},
        {**own[0], "top_p": 9.0},
        {**own[0], "max_tokens": 3000, "timeout_ms": 150},
    ]
    for number, sampling in enumerate(left_out, start=10):
        reply = ask(server, input_ids=prompt(number), **sampling)
        assert (reply.error is None) == ("top_p" not in sampling), reply.error
    command(server, "slow")
    leaving = Ask(server, input_ids=prompt(30), **{**own[0], "max_tokens": 3000})
    leaving.next()
    leaving.next()
    leaving.cancel()
    until(lambda: command(server, "stats")["num_running"] == 0)
    command(server, "fast")
    told.append((31, 0.75, ask(server, input_ids=prompt(31), **own[1]).ids))
    wait_for(recorded, 31)
    found, heads = kept(recorded)
    assert found == told
    target = load_target(str(repository.parent / "target"))
    head = {"format_version": 1, "target_hash": target.config.model_hash}
    assert heads == [head] * max(1, len(heads))


def test_every_door_keeps_an_answer_once_and_each_choice_by_itself(server, recorded, tmp_path):
    """`vllm_model`, and OpenAI's gateway with two choices; penalties are left out there, too."""
    before = len(all_lines(recorded))
    sampling = json.dumps({"max_tokens": "6", "temperature": "0", "ignore_eos": True})
    told = ask(server, text_input="The quick", sampling_parameters=sampling, stream=False, model="vllm_model")
    assert told.error is None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gateway = GatewayProcess(
        grpc_url=server.grpc_url,
        host="127.0.0.1",
        port=port,
        model_name="dspark",
        log_file=tmp_path / "log",
        drain_timeout_s=5.0,
    )
    gateway.start()
    try:
        given = {"prompt": "The lazy", "max_tokens": 7, "temperature": 0.5, "seed": 3, "ignore_eos": True}
        for extra in ({"n": 2}, {"presence_penalty": 1.0}, {"n": 1, "stream": True}):
            body = json.dumps({"model": "dspark", **given, **extra}).encode()
            asked = urllib.request.Request(
                f"{gateway.url}/completions", data=body, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as reply:
                assert reply.status == 200 and reply.read()
    finally:
        gateway.stop()
    ask(server, input_ids=prompt(50), temperature=0.0, **OWN)
    wait_for(recorded, 50)
    *kept_here, _last = all_lines(recorded)[before:]
    lengths = [(len(line["output_ids"]), line["temperature"]) for line in kept_here]
    assert lengths == [(6, 0.0), (7, 0.5), (7, 0.5), (7, 0.5)]
    first, second, streamed = (line["output_ids"] for line in kept_here[1:])
    assert first != second and streamed in (first, second)  # two seeds; the first is the one that was given


def all_lines(folder):
    """Return every answer kept, in order."""
    found = []
    for path in sorted(folder.glob("traffic-*.jsonl")):
        found += list(map(json.loads, path.read_text().split("\n")[1:-1]))
    return found


def test_only_this_user_may_read_what_is_kept(server, recorded):
    ask(server, input_ids=prompt(40), temperature=0.0, **OWN)
    wait_for(recorded, 40)
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in recorded.iterdir()} == {0o600}
