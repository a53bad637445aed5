"""When an answer ends, and the text that may be shown until then."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from services.model.text_stream import TextStream


class Finish(enum.Enum):
    """Why an answer ended; the names are FinishReason's."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends an answer; the fields are common.proto's."""

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    """The request's own stop tokens and, unless it ignores them, the model's end tokens."""


class Answer:
    """The tokens of an answer as they are emitted, and their text.

    Text is held back while it may be half a character or the beginning of a stop string. The token that ends an answer
    belongs to it (it was generated and is counted); of a stop string no part is ever shown.
    """

    def __init__(self, stop: StopConditions, stream: TextStream) -> None:
        self.count = 0
        self.finish: Finish | None = None
        self._stop = stop
        self._stream = stream
        self._held = ""

    def extend(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Take tokens in until the answer ends. Returns those taken, and the text that is certain now."""
        taken: list[int] = []
        text = ""
        for token in tokens:
            taken.append(token)
            self.count += 1
            text += self._push(token)
            if self.finish is not None:
                return taken, text + self._rest()
        return taken, text

    def _push(self, token: int) -> str:
        """The text that is certain once ``token`` is known; sets ``finish``."""
        may_stop = self.count > self._stop.min_tokens or self.count == self._stop.max_tokens
        self._held += self._stream.push(token)
        shown = ""
        while (found := self._find()) is not None:
            begin, end = found
            if may_stop:
                self.finish = Finish.STOP
                shown, self._held = shown + self._held[:begin], ""
                return shown
            shown, self._held = shown + self._held[:end], self._held[end:]
        if token in self._stop.token_ids and may_stop:
            self.finish = Finish.STOP
        elif self.count >= self._stop.max_tokens:
            self.finish = Finish.LENGTH
        keep = self._possible_beginning()
        certain = len(self._held) - keep
        shown, self._held = shown + self._held[:certain], self._held[certain:]
        return shown

    def _find(self) -> tuple[int, int] | None:
        """The stop string that begins first in what is held."""
        found = [(at, at + len(s)) for s in self._stop.strings if (at := self._held.find(s)) >= 0]
        return min(found, default=None)

    def _possible_beginning(self) -> int:
        """Length of the longest end of what is held that a stop string begins with."""
        return max(
            (n for s in self._stop.strings for n in range(1, len(s)) if self._held.endswith(s[:n])),
            default=0,
        )

    def _rest(self) -> str:
        """What was held back, at the end: text like any other, for a stop string leaves nothing held. Half a character
        that the last token left open is not text.
        """
        rest, self._held = self._held, ""
        return rest
