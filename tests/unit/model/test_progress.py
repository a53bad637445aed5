"""Long steps say on stderr how far they are."""

from __future__ import annotations

import pytest

from services.model import progress
from services.model.progress import Terminal


def test_without_a_terminal_a_step_says_so_in_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with Terminal().bytes("reading weights", 4_000_000) as advance:
        advance(1_000_000)
        advance(2_000_000)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "reading weights: 1 of 4 MB\nreading weights: 3 of 4 MB\n"


def test_a_short_step_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Terminal().bytes("reading weights", 4_000_000) as advance:
        advance(4_000_000)
    assert capsys.readouterr().err == ""
