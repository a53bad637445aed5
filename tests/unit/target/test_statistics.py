"""The tag's identities hold whatever the rounds were, and however a stop cut them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from slipstream.v1 import common_pb2

from services.target.statistics import Statistics


def tag(
    statistics: Statistics, requested: common_pb2.Mode = common_pb2.MODE_AUTO, reason: str = ""
) -> common_pb2.OptimizationTag:
    return statistics.tag(requested, reason, "features", "sha256:x", common_pb2.VERIFICATION_BLOCK)


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(draw(st.integers(0, 20))):
        drafted = draw(st.integers(0, 8))
        accepted = draw(st.integers(0, drafted))
        found.append((drafted, accepted, draw(st.integers(1, accepted + 1))))
    return found


@given(rounds())
def test_the_identities_hold(played: list[tuple[int, int, int]]) -> None:
    statistics = Statistics()
    for round_ in played:
        statistics.add_round(*round_)
    made = tag(statistics)
    origin, histogram = made.tokens_by_origin, list(made.acceptance_histogram)
    assert sum(histogram) == made.num_spec_steps
    assert sum(i * n for i, n in enumerate(histogram)) == made.num_accepted_draft_tokens == origin.accepted
    emitted = sum(e for _, _, e in played)
    assert (
        origin.accepted + origin.correction + origin.bonus + origin.standard == emitted == statistics.completion_tokens
    )


def test_what_a_stop_cut_off_was_not_accepted() -> None:
    statistics = Statistics()
    assert statistics.add_round(drafted=4, accepted=4, emitted=2) == 2
    made = tag(statistics)
    assert made.num_draft_tokens == 4
    assert made.num_accepted_draft_tokens == 2
    assert made.tokens_by_origin.bonus == 0


def test_the_token_after_a_whole_run_is_a_bonus_and_after_a_rejection_a_correction() -> None:
    statistics = Statistics()
    statistics.add_round(2, 2, 3)
    statistics.add_round(2, 1, 2)
    assert (statistics.bonus, statistics.correction, statistics.accepted) == (1, 1, 3)


def test_passes_saved_are_those_that_standard_decoding_would_have_needed() -> None:
    statistics = Statistics(prefill_passes=1, decode_passes=3)
    statistics.add_round(0, 0, 1)
    for _ in range(3):
        statistics.add_round(4, 2, 3)
    made = tag(statistics)
    assert (made.target_passes, made.target_passes_saved) == (4, 6)
    assert made.mean_acceptance_length == 3


def test_the_reason_is_told_only_where_the_mode_differs() -> None:
    statistics = Statistics()
    assert tag(statistics, common_pb2.MODE_STANDARD, "draft absent").mode_reason == ""
    assert tag(statistics, common_pb2.MODE_AUTO, "draft absent").mode_reason == "draft absent"
    assert tag(statistics, common_pb2.MODE_AUTO).mode_reason == "the answer ended before a round"
    statistics.fallbacks[common_pb2.FALLBACK_REASON_DRAFT_SLOW] += 1
    assert tag(statistics, common_pb2.MODE_AUTO).mode_reason == "draft slow"
    statistics.add_round(4, 0, 1)
    assert tag(statistics, common_pb2.MODE_AUTO, "draft absent").mode_reason == ""
