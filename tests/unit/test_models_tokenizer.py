"""Tokenizers from folders and GGUF files, token bytes, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dspark.errors import CheckpointError, RequestError
from dspark.models.loading import load_target
from dspark.models.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import (
    CHAT_TEMPLATE,
    random_weights,
    tiny_config,
    tiny_tokenizer,
    write_tiny_gguf,
    write_tiny_target,
)
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

MESSAGES = [{"role": "user", "content": "add(1, 23)?"}]
TEXTS = (
    "",
    " ",
    "Hello  world",
    "  12 345\n\n",
    "naïve café 🙂",
    "𝔘nicode \u200d",
    "a\tb\r\nc",
    "it's we'll I'M",
)


def _folder(path: Path) -> Tokenizer:
    tokenizer = load_target(write_tiny_target(path, with_tokenizer=True)).tokenizer
    assert tokenizer is not None
    return tokenizer


def _gguf(path: Path, **fields: Any) -> Tokenizer:
    config = tiny_config(vocab_size=400)
    keys = {f"tokenizer.{key.replace('__', '.')}": value for key, value in fields.items()}
    written = write_tiny_gguf(
        path, config, random_weights(config), tokenizer=tiny_tokenizer(300), fields=keys
    )
    tokenizer = load_target(written).tokenizer
    assert tokenizer is not None
    return tokenizer


# A sentencepiece vocabulary: every byte, the characters of three words and what they merge to.
_PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "▁h",
    "ll",
    "el",
    "ello",
    "▁hello",
    "or",
    "ld",
    "▁w",
    "orld",
]
_SPM = {
    "ggml__model": "llama",
    "ggml__tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *_PIECES],
    "ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * len(_PIECES)],
    "ggml__scores": [0.0] * 259 + [-float(i) for i in range(len(_PIECES))],
    "ggml__bos_token_id": 1,
    "ggml__eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folder_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _folder(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _gguf(tmp_path_factory.mktemp("spm") / "t.gguf", **_SPM)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_byte_level_decoding_undoes_encoding(folder_tokenizer: Tokenizer, text: str) -> None:
    ids = folder_tokenizer.encode(text)
    assert folder_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(folder_tokenizer.token_bytes(i) for i in ids) == text.encode()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=40).filter(lambda text: "\u2581" not in text))
def test_sentencepiece_decoding_undoes_encoding(spm_tokenizer: Tokenizer, text: str) -> None:
    ids = spm_tokenizer.encode(text, add_special_tokens=False)
    assert spm_tokenizer.decode(ids) == text
    joined = b"".join(spm_tokenizer.token_bytes(i) for i in ids)
    assert joined == (b" " + text.encode() if text else b"")
    assert spm_tokenizer.leading_space_stripped


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 299), max_size=12))
def test_decoding_equals_that_of_the_tokenizers_package(folder_tokenizer: Tokenizer, ids: list[int]) -> None:
    ids = [i for i in ids if i < folder_tokenizer.vocab_size]
    assert folder_tokenizer.decode(ids) == tiny_tokenizer(300).decode(ids)


def test_sentencepiece_merges_the_best_scores_first(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode("hello world", add_special_tokens=False)
    # ▁h comes first, then ll, so that el, ello and ▁hello can no longer be made; or and ld join again.
    assert [spm_tokenizer.token_bytes(i) for i in ids] == [b" h", b"e", b"ll", b"o", b" w", b"orld"]


def test_sentencepiece_falls_back_to_bytes_and_adds_the_begin_token(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode("é")
    assert ids[0] == spm_tokenizer.bos_id == 1
    assert [spm_tokenizer.token_bytes(i) for i in ids[1:]] == [b" ", b"\xc3", b"\xa9"]
    assert spm_tokenizer.decode(ids) == "é"
    assert spm_tokenizer.is_special(1) and not spm_tokenizer.is_special(ids[-1])


def test_sentencepiece_without_the_space_prefix(tmp_path: Path) -> None:
    tokenizer = _gguf(tmp_path / "t.gguf", **_SPM, ggml__add_space_prefix=False, ggml__add_bos_token=False)
    ids = tokenizer.encode("hello")
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"hello"
    assert not tokenizer.leading_space_stripped


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_folder_of_the_same_tokenizer_agree(
    tmp_path: Path, folder_tokenizer: Tokenizer, text: str
) -> None:
    from_gguf = _gguf(tmp_path / "t.gguf")
    assert from_gguf.encode(text) == folder_tokenizer.encode(text)
    assert from_gguf.eos_ids == folder_tokenizer.eos_ids
    assert from_gguf.vocab_size == folder_tokenizer.vocab_size
    assert from_gguf.apply_chat_template(MESSAGES) == folder_tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a 12b's", ["a", " ", "1", "2", "b", "'s"]),
        ("gpt-2", "a 12b's", ["a", " 12", "b", "'s"]),
        ("llama-bpe", "a 1234b'S\n\n x", ["a", " ", "123", "4", "b", "'S", "\n\n", " x"]),
        ("qwen2", "a 12b'S", ["a", " ", "1", "2", "b", "'S"]),
        ("default", "a 1234+b", ["a", " ", "123", "4", "+", "b"]),
    ],
)
def test_pre_tokenizers_split_as_published(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    """A vocabulary in which every word of the test would be one token shows where splits happen."""
    alphabet = {chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]}
    tokens, merges = sorted(alphabet), []
    for start in range(len(text)):
        for stop in range(start + 2, len(text) + 1):
            piece = text[start:stop].replace(" ", "Ġ").replace("\n", "Ċ")
            if piece not in tokens:
                tokens.append(piece)
            merges.append(f"{piece[:-1]} {piece[-1]}")
    tokenizer = _gguf(
        tmp_path / "t.gguf",
        ggml__pre=pre,
        ggml__tokens=tokens,
        ggml__token_type=[1] * len(tokens),
        ggml__merges=list(dict.fromkeys(merges)),  # the earlier start, then the shorter piece, first
        ggml__eos_token_id=0,
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_bytes(i).decode() for i in ids] == words


def test_user_defined_tokens_show_and_control_tokens_do_not(tmp_path: Path) -> None:
    types = [3, 3, 3, 4, *[1] * 296]
    tokens = [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"),
        *map(chr, range(0x4E00, 0x4E00 + 295)),
        "一丁",
    ]
    tokenizer = _gguf(
        tmp_path / "t.gguf", ggml__tokens=tokens, ggml__token_type=types, ggml__merges=["一 丁"]
    )
    assert tokenizer.encode("<think>") == [3]
    assert tokenizer.decode([3, 2]) == "<think>"
    assert tokenizer.decode([3, 2], skip_special_tokens=False) == "<think><|im_end|>"


def test_special_tokens_are_told_apart_and_keep_their_name(folder_tokenizer: Tokenizer) -> None:
    ids = folder_tokenizer.encode("<|im_start|>user")
    assert folder_tokenizer.is_special(ids[0]) and not any(map(folder_tokenizer.is_special, ids[1:]))
    assert folder_tokenizer.token_bytes(ids[0]) == b"<|im_start|>"
    assert folder_tokenizer.decode(ids) == "user"


def test_ids_outside_the_vocabulary_stand_for_nothing(folder_tokenizer: Tokenizer) -> None:
    assert folder_tokenizer.token_bytes(10**6) == b"" and folder_tokenizer.token_bytes(-1) == b""
    assert folder_tokenizer.decode([10**6, *folder_tokenizer.encode("x")]) == "x"


def test_text_that_is_no_unicode_is_refused(folder_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="text_input"):
        folder_tokenizer.encode("\ud800")
    with pytest.raises(RequestError, match="messages"):
        folder_tokenizer.apply_chat_template([{"role": "user", "content": "\ud800"}])


def test_chat_template_gives_the_published_text(folder_tokenizer: Tokenizer) -> None:
    assert folder_tokenizer.has_chat_template
    text = "<|im_start|>user\nadd(1, 23)?<|im_end|>\n"
    ids = folder_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert folder_tokenizer.decode(ids, skip_special_tokens=False) == text
    ids = folder_tokenizer.apply_chat_template(MESSAGES)
    assert folder_tokenizer.decode(ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "messages",
    [[], "text", {"role": "user"}, [1], [{"content": "x"}], [{"role": 3}], [{"role": "user"}], None],
)
def test_messages_of_another_shape_are_refused(folder_tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages: got"):
        folder_tokenizer.apply_chat_template(messages)


def _with_template(folder: Path, template: object, **settings: object) -> Tokenizer:
    write_tiny_target(folder, with_tokenizer=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template} | settings))
    tokenizer = load_target(folder).tokenizer
    assert tokenizer is not None
    return tokenizer


def _rendered(tokenizer: Tokenizer, **kwargs: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, **kwargs), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # trim_blocks and lstrip_blocks
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ bos_token }}{{ eos_token }}", "<|endoftext|><|im_end|>"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
    ],
)
def test_templates_find_the_environment_of_transformers(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = _with_template(tmp_path, template, bos_token={"content": "<|endoftext|>"})
    assert _rendered(tokenizer) == text


def test_templates_refuse_messages_through_raise_exception(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.apply_chat_template(MESSAGES)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, "{{ messages.__class__.__mro__[-1].__subclasses__() }}")
    with pytest.raises(RequestError, match="messages"):
        tokenizer.apply_chat_template(MESSAGES)


def test_tools_pick_the_template_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    tokenizer = _with_template(tmp_path, templates)
    assert _rendered(tokenizer) == "plain"
    assert _rendered(tokenizer, tools=[{"name": "clock"}]) == "clock"


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, with_tokenizer=True)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert _rendered(load_target(tmp_path).tokenizer) == "from the file"  # type: ignore[arg-type]


def test_a_broken_template_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        _with_template(tmp_path, "{% for %}")


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_sentencepiece_folder_is_recognised_by_its_decoder(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    backend = Backend(
        models.BPE(vocab={"<unk>": 0, "▁": 1, "a": 2, "<0x41>": 3}, merges=[], unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_target(tmp_path).tokenizer
    assert tokenizer is not None and tokenizer.leading_space_stripped
    assert tokenizer.decode([1, 2, 1, 3]) == "a A"


def test_other_decoders_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_target(tmp_path, with_tokenizer=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
        )
    )
    with pytest.raises(CheckpointError, match="WordPiece"):
        load_target(tmp_path)


def test_vocabularies_in_other_formats_are_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model but no tokenizer\.json"):
        load_target(tmp_path)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tiny_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer(300).to_str())
    with pytest.raises(CheckpointError, match="the tokenizer has 300 tokens, the model's vocabulary only 50"):
        load_target(tmp_path)


def test_unknown_pre_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'falcon', allowed are .*'smollm'"):
        _gguf(tmp_path / "t.gguf", ggml__pre="falcon")


def test_chat_template_travels_in_the_file(tmp_path: Path) -> None:
    tokenizer = _gguf(tmp_path / "t.gguf", chat_template=CHAT_TEMPLATE)
    assert tokenizer.has_chat_template
    assert not _gguf(tmp_path / "u.gguf", chat_template="").has_chat_template
