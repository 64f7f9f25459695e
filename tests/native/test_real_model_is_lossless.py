"""Greedy speculative output equals plain output in every dtype: the demo model, the native pass, a real server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dspark.serving.contract import config_pbtxt
from dspark_plugins.native import native_available, native_unavailable_reason
from support.server import Ask, server_process

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHIPPED = ROOT / "model_repository" / "dspark" / "1" / "drafter"
PROMPTS = (
    "Repeat three times: the cat sat on the mat.",
    "List the even numbers from 2 to 20, then list them again.",
    "What is the capital of France?",
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.model,
    pytest.mark.skipif(not MODEL.is_file(), reason=f"no {MODEL.name}: make setup fetches it"),
    pytest.mark.skipif(not native_available(), reason=f"no native code: {native_unavailable_reason()}"),
]


def repository(folder: Path, dtype: str, drafter: str) -> Path:
    version = folder / "repository" / "dspark" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config_pbtxt())
    shutil.copy(ROOT / "model_repository" / "dspark" / "1" / "model.py", version)
    settings = {
        "target": MODEL,
        "drafter": drafter,
        "dtype": dtype,
        "executor": "native",
        "policy": "fixed:4",
        "max_context_len": 256,
        "cache_bytes": "64MiB",
    }
    text = "".join(f"{name}: {value}\n" for name, value in settings.items())
    (version / "model.yaml").write_text(text)
    return folder / "repository"


@pytest.mark.parametrize(
    ("dtype", "drafter"),
    [("float32", "shipped"), ("bfloat16", "shipped"), ("int8", "shipped"), ("bfloat16", "ngram")],
)
def test_greedy_speculative_output_equals_plain_output(dtype: str, drafter: str, tmp_path: Path) -> None:
    spec = drafter if drafter == "ngram" else str(SHIPPED)
    with server_process(repository(tmp_path, dtype, spec), start_timeout_s=120.0) as server:

        def asked(prompt: str, **inputs: object) -> Ask:
            return Ask(
                server,
                messages=json.dumps([{"role": "user", "content": prompt}]),
                max_tokens=40,
                temperature=0.0,
                ignore_eos=True,
                return_perf_metrics=True,
                **inputs,
            )

        streams = [asked(prompt) for prompt in PROMPTS]  # all at once
        together = [stream.wait() for stream in streams]
        alone = [asked(prompt, num_draft_tokens=0).wait() for prompt in PROMPTS]  # nothing drafted, in turn
    for speculative, plain in zip(together, alone, strict=True):
        assert plain.error is None and speculative.error is None
        assert len(plain.ids) == 40
        assert speculative.ids == plain.ids
        assert plain.last["total_draft_tokens"][0] == 0
    assert sum(int(reply.last["total_draft_tokens"][0]) for reply in together) > 0
    if drafter == "shipped":
        accepted = sum(int(reply.last["total_accepted_draft_tokens"][0]) for reply in together)
        assert accepted > 0.25 * sum(len(reply.ids) for reply in together), (
            "a drafter worth shipping is right"
        )
