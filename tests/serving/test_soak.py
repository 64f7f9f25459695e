"""Long abuse leaves nothing behind: no page, no memory, no shared memory, no stream without an end.

Short here; `make soak` runs 10,000 cancels and ten minutes of mixed traffic, and prints what it measured:
DSPARK_TEST_CANCELS is the number of cancels, DSPARK_TEST_SOAK_S the seconds of mixed traffic.
"""

import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
from support.malformed import malformed_tensors
from support.raw_stream import RawChannel, ids_of
from support.server import command, model_process, server_process, shared_memory, until_idle

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NUM_CANCELS = int(os.environ.get("DSPARK_TEST_CANCELS", "300"))
SOAK_S = float(os.environ.get("DSPARK_TEST_SOAK_S", "4"))
NUM_CLIENTS = 24
# Fewer places than clients: some wait. A small cache: all of its memory is touched before the first look.
SETTINGS = {"max_batch_size": 16, "cache_bytes": 1 << 23}


@pytest.fixture(scope="module")
def small_server(repository):
    with server_process(repository, settings=SETTINGS) as server:
        fill_word_cache(server)
        yield server


def fill_word_cache(server):
    """Make the tokenizer see 15,000 words: it keeps the spelling of the first 10,000, some 5 MiB.

    The prompts are longer than the context, so they are tokenized and refused.
    """
    rng = random.Random(5)
    with RawChannel(server.grpc_url) as channel:
        for _ in range(5):
            words = ("".join(rng.choices("abcdefgh", k=8)) for _ in range(3000))
            (refusal,) = channel.stream(text_input=" ".join(words), max_tokens=1)
            assert "tokens" in refusal.error_message, refusal


def footprint(server):
    """Return bytes: resident memory of server and model process, and shared memory."""
    pids = {"server": server.pid, "model": model_process(server.pid)}
    figures = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
    figures["shared"] = sum(region.stat().st_blocks * 512 for region in shared_memory(server.pid))
    return figures


def told(name, count, before, after, counters):
    sizes = ", ".join(f"{key} {before[key] / 2**20:.1f} -> {after[key] / 2**20:.1f} MiB" for key in before)
    print(f"\n{name}: {count}; {sizes}; pages held {counters['pages_held']} of {counters['pages_total']}, "
          f"open {counters['open']}")  # fmt: skip


def grown(before, after):
    """Return by what part of it resident memory has grown."""
    total = before["server"] + before["model"]
    return (after["server"] + after["model"]) / total - 1.0


# ---- what is loaded once is loaded at the start ---------------------------------------------------------


def test_the_first_guide_finds_its_library_loaded(small_server):
    server = small_server
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{9}", "temperature": 0.0}
    with RawChannel(server.grpc_url) as channel:
        for index in range(30):
            ids_of(list(channel.stream(text_input=f"without a guide {index}", max_tokens=20, **GREEDY)))
        before = footprint(server)
        ids_of(list(channel.stream(text_input="with a guide", max_tokens=20, **guide)))
    assert footprint(server)["model"] - before["model"] < 2 * 2**20


# ---- cancels ---------------------------------------------------------------------------------------------


def cancel_some(url, client, count):
    """Leave `count` requests, at a moment drawn: sent but perhaps not there yet, waiting, at work."""
    rng = random.Random(client)
    with RawChannel(url) as channel:
        for index in range(count):
            prompt = f"client {client} leaves for the {index}th time"
            call = channel.stream(text_input=prompt, max_tokens=3000, stream=True, **GREEDY)
            moment = rng.random()
            if moment < 0.6:
                for _ in range(rng.choice((1, 1, 1, 3))):
                    next(call)
            elif moment < 0.8:
                time.sleep(0.003 * rng.random())
            call.cancel()


def cancel_many(server, count):
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        shares = [count // NUM_CLIENTS + (client < count % NUM_CLIENTS) for client in range(NUM_CLIENTS)]
        for done in [pool.submit(cancel_some, server.grpc_url, *one) for one in enumerate(shares)]:
            done.result()
    return until_idle(server)


def test_cancels_leave_no_page_and_no_memory_behind(small_server):
    server = small_server
    cancel_many(server, max(200, NUM_CANCELS // 20))  # what is allocated once
    before = footprint(server)
    cancelled = command(server, "stats")["num_cancelled"]
    counters = cancel_many(server, NUM_CANCELS)
    after = footprint(server)
    told("cancels", NUM_CANCELS, before, after, counters)
    assert counters["num_cancelled"] - cancelled > 0.5 * NUM_CANCELS  # some were gone before they came
    assert after["shared"] <= before["shared"]
    assert grown(before, after) < 0.05
    with RawChannel(server.grpc_url) as channel:
        assert len(ids_of(list(channel.stream(text_input="x", max_tokens=9, **GREEDY)))) == 9


# ---- mixed traffic ---------------------------------------------------------------------------------------


def one_of_many(channel, rng):
    """Send one request of mixed traffic; return what became of it."""
    kind = rng.random()
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 400)))
    if kind < 0.1:
        tensors = {name: array for name, array in malformed_tensors(rng).items() if array.size}
        responses = list(channel.stream(**{**tensors, "timeout_ms": 200}))
        return "malformed" if responses else "hung"
    asked = {
        "text_input": prompt,
        "stream": rng.random() < 0.7,
        "seed": rng.randrange(2**32),
        "ignore_eos": True,
    }
    if kind < 0.4:
        call = channel.stream(**asked, max_tokens=3000)
        time.sleep(0.05 * rng.random())
        call.cancel()
        return "left"
    if kind < 0.5:
        call = channel.stream(**asked, max_tokens=3000, timeout_ms=rng.randrange(1, 200))
        ids_of(list(call))
        return "timed out"
    wanted = rng.randrange(1, 80)
    assert len(ids_of(list(channel.stream(**asked, max_tokens=wanted)))) == wanted
    return "answered"


def traffic(url, client, until_s):
    rng, ends = random.Random(client), Counter()
    with RawChannel(url) as channel:
        while time.monotonic() < until_s:
            try:
                ends[one_of_many(channel, rng)] += 1
            except grpc.RpcError as error:
                ends[f"grpc {error.code().name}"] += 1
    return ends


def mixed(server, seconds, seed):
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        until_s = time.monotonic() + seconds
        clients = [
            pool.submit(traffic, server.grpc_url, seed + client, until_s) for client in range(NUM_CLIENTS)
        ]
        return sum((client.result() for client in clients), Counter())


def test_mixed_traffic_leaves_nothing_behind(small_server):
    server = small_server
    mixed(server, max(2.0, SOAK_S / 10), seed=1000)
    until_idle(server)
    before = footprint(server)
    ends = mixed(server, SOAK_S, seed=0)
    counters = until_idle(server)
    after = footprint(server)
    told(f"mixed traffic, {SOAK_S:g} s", dict(ends), before, after, counters)
    assert set(ends) == {"malformed", "left", "timed out", "answered"}, ends
    assert after["shared"] <= before["shared"]
    assert grown(before, after) < (0.02 if SOAK_S > 60 else 0.1)
