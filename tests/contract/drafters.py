"""Drafters for processes that the tests start: SLIPSTREAM_DRAFT_DRAFTER=tests.contract.drafters:counting."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from services.draft.settings import DraftSettings
from services.link.round import ContextUpdate, SequenceDraft
from tests.unit.link.toys import CountingDrafter, draft_info


class _Switched(CountingDrafter):
    """Does what a file of the test says, for as long as it says so: "slow" or "crash"."""

    def __init__(self, switch: Path) -> None:
        super().__init__(draft_info(feature_layers=[1] if "TEST_DRAFT_FEATURES" in os.environ else []))
        self._switch = switch

    def propose(self, updates: Sequence[ContextUpdate]) -> list[SequenceDraft]:
        said = self._switch.read_text() if self._switch.exists() else ""
        if said == "slow":
            time.sleep(0.3)
        if said == "crash":
            os.abort()
        return super().propose(updates)


def counting(settings: DraftSettings) -> CountingDrafter:
    return _Switched(settings.socket.with_name("switch"))
