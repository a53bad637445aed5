"""``slipstream generate`` against a gateway: what is printed where, and how it exits."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

from click.testing import CliRunner, Result
from slipstream.v1 import common_pb2

from cli.main import main
from tests.contract.targets import Front, chunk, eventually, finished, front, started
from tests.contract.test_gateway import hang, plays


async def run(house: Front, *arguments: str, stdin: str | None = None) -> Result:
    command = ["generate", "--address", house.address, *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, command, input=stdin)


async def test_json_is_one_object_with_text_ids_ends_and_the_whole_tag() -> None:
    async with front() as house:
        house.target.script = plays(started(), chunk(2, text="Grüß "), chunk(1, text="dich"), finished(tokens=3))
        result = await run(house, "Hi", "--json", "--mode", "speculative", "--max-tokens", "9", "--temperature", "0.5")
        assert result.exit_code == 0
        answer: dict[str, Any] = json.loads(result.stdout)
        assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "tag"}
        assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Grüß dich", [0, 1, 0], "stop")
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 3)
        assert set(answer["tag"]) == {field.name for field in common_pb2.OptimizationTag.DESCRIPTOR.fields}
        assert answer["tag"]["active_mode"] == "standard"
        assert answer["tag"]["tokens_by_origin"]["standard"] == 3
        sent = house.target.requests[0]
        assert (sent.mode, sent.stop.max_tokens, sent.sampling.temperature) == (common_pb2.MODE_SPECULATIVE, 9, 0.5)


async def test_text_goes_to_stdout_and_the_summary_to_stderr() -> None:
    async with front() as house:
        result = await run(house, "-", stdin="from a pipe")
        assert result.stdout == "a\n"
        assert "standard" in result.stderr
        assert "7 prompt tokens, 1 completion tokens" in result.stderr
        assert house.target.requests[0].prompt.chat.messages[0].content == "from a pipe"


async def test_bad_input_exits_with_2_and_names_the_field() -> None:
    async with front() as house:
        for option, value in (("--top-p", "7"), ("--seed", "-1"), ("--max-tokens", "0")):
            result = await run(house, "Hi", option, value)
            assert result.exit_code == 2
            assert option.removeprefix("--").replace("-", "_") in result.stderr or "bad value" in result.stderr
            assert "Traceback" not in result.output


async def test_no_gateway_exits_with_1_and_says_what_to_start() -> None:
    async with front() as house:
        await house.server.stop(None)
        result = await run(house, "Hi", "--json")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "slipstream serve" in result.stderr


async def test_a_deadline_exits_with_1() -> None:
    async with front() as house:
        house.target.script = hang()
        result = await run(house, "Hi", "--timeout", "0.3")
        assert result.exit_code == 1
        assert "DEADLINE_EXCEEDED" in result.stderr


async def test_ctrl_c_cancels_the_stream_and_exits_with_130() -> None:
    async with front() as house:
        house.target.script = hang()
        command = [sys.executable, "-m", "cli.main", "generate", "Hi", "--address", house.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(1), 20) == b"a"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 130
        await eventually(lambda: house.target.live == 0)
