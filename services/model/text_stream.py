"""Tokens to text, one at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream(Protocol):
    """What is pushed and flushed adds up to the text that decoding all tokens at once gives."""

    def push(self, token: int) -> str:
        """The text that is certain once ``token`` is known; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end; broken UTF-8 becomes U+FFFD. The stream may be used afresh afterwards."""
        ...


class ByteLevelStream:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): every token is some bytes, so UTF-8 decodes incrementally."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class WindowStream:
    """For any other decoder: decodes a short window of tokens again, and shows what a new token adds to it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], holds: Callable[[int], bool]) -> None:
        """``holds`` tells tokens whose text the next token can still change: single bytes, and those without text."""
        self._decode = decode
        self._holds = holds
        self._window: list[int] = []
        self._shown = 0
        """Tokens at the start of the window whose text was shown."""

    def push(self, token: int) -> str:
        self._window.append(token)
        if self._holds(token):
            return ""
        text = self._news()
        if text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def _news(self) -> str:
        before = self._decode(self._window[: self._shown])
        return self._decode(self._window)[len(before) :]

    def flush(self) -> str:
        rest = self._news()
        self._window, self._shown = [], 0
        return rest


@cache
def byte_of_character() -> Mapping[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2): printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of_token(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any other character (an added one) stands for itself."""
    table = byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def is_byte_token(token: str) -> bool:
    """Whether a token is a single byte of a byte-fallback model, ``<0xE2>``."""
    return _BYTE_TOKEN.fullmatch(token) is not None
