"""The command line's JSON: short words, whole numbers, every field."""

from __future__ import annotations

from click.testing import CliRunner
from slipstream.v1 import common_pb2

from cli.generate import as_dict, build_request
from cli.main import main


def test_enums_are_short_words_and_all_fields_are_there() -> None:
    tag = as_dict(common_pb2.OptimizationTag(active_mode=common_pb2.MODE_SPECULATIVE, time=common_pb2.TimeSplit()))
    assert tag["active_mode"] == "speculative"
    assert tag["num_draft_tokens"] == 0
    assert tag["acceptance_histogram"] == []
    assert tag["fallbacks"] == []


def test_fallback_reasons_are_short_words() -> None:
    reason = common_pb2.FALLBACK_REASON_DRAFT_SLOW
    assert as_dict(common_pb2.Fallback(reason=reason, rounds=2)) == {"reason": "draft_slow", "rounds": 2}


def test_options_that_are_not_given_are_left_to_the_server() -> None:
    request = build_request("hi", temperature=None, seed=0)
    assert not request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert not request.stop.HasField("max_tokens")


def test_raw_text_is_continued_and_chat_is_rendered() -> None:
    assert build_request("hi", raw=True).prompt.text == "hi"
    turns = build_request("hi", system="be brief").prompt.chat.messages
    assert [(t.role, t.content) for t in turns] == [("system", "be brief"), ("user", "hi")]


def test_an_unknown_mode_is_bad_input() -> None:
    assert CliRunner().invoke(main, ["generate", "hi", "--mode", "fast"]).exit_code == 2


def test_every_command_has_help() -> None:
    for command in ("generate", "serve", "demo"):
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0
