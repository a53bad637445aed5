"""When an answer ends, and which text may be shown until then."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.model.text_stream import ByteLevelStream
from services.target.stopping import Answer, Finish, StopConditions


class Letters:
    """Token n is the n-th letter."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return "\ufffd"


def tokens(text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text]


def test_the_answer_ends_at_max_tokens() -> None:
    answer = Answer(StopConditions(3), Letters())
    assert answer.extend(tokens("abcde")) == (tokens("abc"), "abc")
    assert answer.finish is Finish.LENGTH


def test_an_end_token_inside_a_run_cuts_it_there_and_counts() -> None:
    answer = Answer(StopConditions(10, token_ids=frozenset(tokens("c"))), Letters())
    assert answer.extend(tokens("abcde"))[0] == tokens("abc")
    assert answer.finish is Finish.STOP
    assert answer.count == 3


def test_end_tokens_and_stop_strings_do_not_count_before_min_tokens() -> None:
    answer = Answer(StopConditions(10, min_tokens=4, strings=("bc",), token_ids=frozenset(tokens("a"))), Letters())
    taken, text = answer.extend(tokens("abcdabcx"))
    assert taken == tokens("abcda")
    assert answer.finish is Finish.STOP
    assert text.startswith("abcd")


def test_no_part_of_a_stop_string_is_shown() -> None:
    answer = Answer(StopConditions(20, strings=("xyz",)), Letters())
    shown = [answer.extend(tokens(c))[1] for c in "abxyaxyz"]
    assert "".join(shown) == "abxya"
    assert shown[2:4] == ["", ""]
    assert answer.finish is Finish.STOP


def test_the_stop_string_that_begins_first_wins() -> None:
    answer = Answer(StopConditions(20, strings=("cd", "bcde")), Letters())
    assert answer.extend(tokens("abcdef"))[1] == "ab"


def test_text_held_back_is_shown_when_the_answer_ends_otherwise() -> None:
    answer = Answer(StopConditions(3, strings=("bcd",)), Letters())
    assert answer.extend(tokens("abc"))[1] == "abc"


def test_half_a_character_is_never_shown() -> None:
    stream = ByteLevelStream(lambda token: bytes([token]))
    answer = Answer(StopConditions(6), stream)
    taken, text = answer.extend(list("né🎉".encode()))
    assert len(taken) == 6
    assert text == "né"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=10),
)
def test_rounds_of_any_size_show_the_text_before_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    answer = Answer(StopConditions(max(len(text), 1), strings=tuple(stops)), Letters())
    left, shown, round_ = tokens(text), "", 0
    while left and answer.finish is None:
        size = cuts[round_ % len(cuts)]
        shown += answer.extend(left[:size])[1]
        left, round_ = left[size:], round_ + 1
    # The stop string that is complete first ends the answer; of several, the one that begins first.
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    if ends:
        first = ends[0][0]
        begin = min(b for e, b in ends if e == first)
        assert shown == text[:begin]
    else:
        assert shown == text
