"""The tokenizer that a target serves with: text to ids and back, chat templates, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from services.model.chat_template import ChatTemplate, ChatTemplateError
from services.model.errors import ModelError, first_line
from services.model.text_stream import ByteLevelStream, TextStream, WindowStream, bytes_of_token, is_byte_token

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

RULES = ("model", "pre_tokenizer", "normalizer", "decoder", "added_tokens")
"""Parts of tokenizer.json that decide which ids a text has and which text an id has."""


class TokenizerError(ModelError):
    """A tokenizer that cannot be read, or text that it cannot take."""


class Tokenizer:
    """Text and ids of one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        names = dict(special_tokens or {})
        self._template = ChatTemplate(chat_template, names) if chat_template else None
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocabulary_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_token_ids = tuple(eos_token_ids) or self._ids_of(names.get("eos_token"))
        self.bos_token_id = next(iter(self._ids_of(names.get("bos_token"))), None)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Of a prepared model or a Hugging Face folder.

        End tokens come from generation_config.json, else config.json, else tokenizer_config.json; the chat template
        from chat_template.jinja, else tokenizer_config.json. Raises TokenizerError for what is missing or broken.
        """
        settings = _json(folder / "tokenizer_config.json")
        names = {name: _content(settings[name]) for name in SPECIAL_TOKENS if settings.get(name) is not None}
        return cls(
            _open(folder / "tokenizer.json"),
            chat_template=_chat_template(folder, settings),
            special_tokens=names,
            eos_token_ids=_end_tokens(folder),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the special tokens that the model puts around it unless told otherwise.

        Raises TokenizerError for text that is not valid Unicode.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise TokenizerError("the text is not valid Unicode") from error
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model reads it. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template: send text or token ids")
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation (each message with role and content), up to the opening of the answer.

        Raises ChatTemplateError if the model has no template or its template refuses the conversation.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; ids that only pad the embedding have no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A decoder for the tokens of one answer."""
        if self._is_byte_level:
            return ByteLevelStream(self._token_bytes)
        return WindowStream(self.decode, self._holds)

    @cached_property
    def fingerprint(self) -> str:
        """Of token strings by id and of the rules: "sha256:" and 64 hex digits.

        Padding of the embedding, truncation and padding of inputs have no part in it.
        """
        content = json.loads(self._tokenizer.to_str())
        canonical = json.dumps({rule: content.get(rule) for rule in RULES}, sort_keys=True, ensure_ascii=True)
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"

    def _token_bytes(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            name = None if token in self.special_token_ids else self._tokenizer.id_to_token(token)
            found = self._bytes[token] = b"" if name is None else bytes_of_token(name)
        return found

    def _holds(self, token: int) -> bool:
        name = self._tokenizer.id_to_token(token)
        return name is None or token in self.special_token_ids or is_byte_token(name)

    def _ids_of(self, name: str | None) -> tuple[int, ...]:
        token = None if name is None else self._tokenizer.token_to_id(name)
        return () if token is None else (token,)


def _open(path: Path) -> FastTokenizer:
    if not path.exists():
        raise TokenizerError(f"{path.name} is missing in the model folder")
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"{path.name} is not a tokenizer that can be read ({first_line(error)}); fetch it again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeError) as error:
        raise TokenizerError(f"{path.name} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} must hold one JSON object")
    return content


def _content(token: Any) -> str:
    """A special token is a string, or an object with its content."""
    return str(token["content"] if isinstance(token, dict) else token)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeError as error:
            raise TokenizerError(f"{file.name} is not text in UTF-8; fetch it again") from error
    template = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _end_tokens(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()
