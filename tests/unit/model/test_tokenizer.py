"""Tokens and text are transformers' own; streams never show half a character; fingerprints know what matters."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors
from transformers import AutoTokenizer

from services.model.chat_template import ChatTemplateError
from services.model.tokenizer import Tokenizer, TokenizerError
from tests.unit.model import toys

ODD = [
    "", " ", "\n\n\t", "a\u0301", "ﬁ ﬀ", "مرحبا", "नमस्ते",
    "👩‍👩‍👧‍👦🏳️‍🌈", "\u200b\u202e\ufeff", "\x00\x07", "\U0010ffff", "é" * 50,
    "\ufffd", "<|end|>inside<|turn|>", "naïve😀", "1 234,5", "\r\n", "𝕳𝖊𝖑𝖑𝖔",
]  # fmt: skip
CHAT = [{"role": "system", "content": "be <b>brief</b>"}, {"role": "user", "content": "héllo\n"}]
TEMPLATES = {
    "plain": toys.CHAT_TEMPLATE,
    "blocks are trimmed": "{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ messages[1].content }}{{ eos_token }}",
    "no tools": "{% if tools is not none %}tools{% endif %}{% if documents %}docs{% endif %}{{ messages | length }}",
}

any_ids = st.lists(st.integers(0, 330), max_size=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    toys.save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def bytewise() -> Tokenizer:
    return Tokenizer(toys.byte_fallback())


@pytest.mark.parametrize("text", ODD)
def test_ids_and_text_are_those_of_transformers(text: str, ours: Tokenizer, theirs: Any) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text())
@settings(deadline=None)
def test_any_text_survives_the_way_there_and_back(text: str) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|end|>", "").replace("<|turn|>", "")


BYTE_LEVEL = toys.byte_level()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opening", [True, False])
def test_chat_templates_render_as_in_transformers(name: str, opening: bool, tmp_path: Path) -> None:
    theirs = toys.save_tokenizer(tmp_path, template=TEMPLATES[name])
    ours = Tokenizer.from_folder(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opening)
    assert ours.render_chat(CHAT, opening) == expected


def test_a_conversation_is_encoded_without_further_special_tokens(ours: Tokenizer, theirs: Any) -> None:
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.encode_chat(CHAT) == expected


def test_a_template_may_ask_for_the_date() -> None:
    tokenizer = Tokenizer(toys.byte_level(), chat_template="{{ strftime_now('%Y') }}")
    assert tokenizer.render_chat(CHAT) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_what_a_template_refuses_is_said() -> None:
    tokenizer = Tokenizer(toys.byte_level(), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ messages[7].content }}"],
)
def test_a_template_that_breaks_out_or_breaks_down_is_an_error_of_its_own(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        Tokenizer(toys.byte_level(), chat_template=template).encode_chat(CHAT)


def test_without_a_template_a_conversation_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer(toys.byte_level()).encode_chat(CHAT)


def test_text_that_is_not_unicode_is_refused(ours: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="Unicode"):
        ours.encode("half \ud83d of a pair")


@given(any_ids)
@settings(deadline=None)
def test_a_stream_adds_up_to_the_decoded_text_byte_level(ids: list[int]) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


@given(st.lists(st.one_of(st.integers(0, 270), st.integers(259, 266)), max_size=24))
@settings(deadline=None)
def test_a_stream_adds_up_to_the_decoded_text_byte_fallback(ids: list[int]) -> None:
    tokenizer = bytewise()
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


@given(st.text(min_size=1))
@settings(deadline=None)
@pytest.mark.parametrize("make", [toys.byte_fallback, lambda: BYTE_LEVEL], ids=["byte fallback", "byte level"])
def test_no_piece_of_a_stream_holds_half_a_character(make: Any, text: str) -> None:
    tokenizer = Tokenizer(make())
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text.replace("\ufffd", ""))]
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_comes_with_its_last_token_and_not_before(ours: Tokenizer) -> None:
    stream = ours.stream()
    ids = ours.encode("🦄")
    assert len(ids) > 1
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🦄"]


def test_a_stream_that_ends_inside_a_character_says_so_when_flushed(ours: Tokenizer) -> None:
    stream = ours.stream()
    assert stream.push(ours.encode("🦄")[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ours.encode("a")[0]) == "a"


def test_special_tokens_and_padding_have_no_text(ours: Tokenizer) -> None:
    stream = ours.stream()
    assert [stream.push(token) for token in (0, 1, 10**6)] == ["", "", ""]
    assert ours.decode([0, 1, 10**6]) == ""


def test_end_tokens_fall_back_to_the_tokenizers_own(folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.from_folder(folder).eos_token_ids == (0,)
    toys.save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (7, 8)


def changed(change: Any) -> str:
    tokenizer = FastTokenizer.from_str(BYTE_LEVEL.to_str())
    change(tokenizer)
    return Tokenizer(tokenizer).fingerprint


def test_a_fingerprint_ignores_padding_truncation_and_special_tokens_around() -> None:
    same = changed(lambda t: None)
    assert same.startswith("sha256:")
    assert len(same) == len("sha256:") + 64
    assert changed(lambda t: t.enable_padding(length=9)) == same
    assert changed(lambda t: t.enable_truncation(9)) == same
    around = processors.TemplateProcessing(single="<|turn|> $A", special_tokens=[("<|turn|>", 1)])
    assert changed(lambda t: setattr(t, "post_processor", around)) == same


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_tokens(["new"]),
        lambda t: setattr(t, "normalizer", toys.normalizers.NFC()),
        lambda t: setattr(t, "pre_tokenizer", toys.pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "decoder", toys.decoders.Fuse()),
    ],
    ids=["vocabulary", "normalizer", "pre-tokenizer", "decoder"],
)
def test_a_fingerprint_knows_token_strings_and_rules(change: Any) -> None:
    assert changed(change) != changed(lambda t: None)


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 3}'])
def test_a_tokenizer_that_is_missing_or_broken_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
