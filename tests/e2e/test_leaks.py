"""Five hundred mixed requests leave the system as it was: slots, descriptors, shared memory, resident memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from slipstream.v1 import common_pb2

from tests.e2e.prompts import PROMPTS
from tests.stack import Answer, Client, Stack, generate_request, identities_hold, messages, until

REQUESTS = 500
KINDS = ("whole", "cancel", "deadline", "bad", "sampled")


@pytest.fixture
def running(own_stack: Stack) -> Iterator[Stack]:
    return own_stack.start()


class Load:
    """One caller after another, each drawn by a seed."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.client = Client(stack.gateway_address)
        self.wrong: list[str] = []

    def one(self, seed: int) -> None:
        mix = random.Random(seed)
        kind = mix.choice(KINDS)
        sampling = common_pb2.SamplingParams(temperature=1.0 if kind == "sampled" else 0, seed=seed)
        request = generate_request(
            mix.choice(PROMPTS),
            mix.choice([1, 2, 3]),
            mix.randint(1, 30),
            sampling=sampling,
            request_id=f"{kind}-{seed}",
        )
        if kind == "bad":
            request.sampling.top_k = -1
        answer = Answer()
        call = self.client.open(request, timeout=0.05 if kind == "deadline" else 120)
        try:
            for i, _ in enumerate(messages(call, answer)):
                if kind == "cancel" and i == 2:
                    call.cancel()
        except grpc.RpcError as error:
            expected = {
                "cancel": grpc.StatusCode.CANCELLED,
                "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
                "bad": grpc.StatusCode.INVALID_ARGUMENT,
            }.get(kind)
            if error.code() is not expected:
                self.wrong.append(f"{kind}: {error.code()} {error.details()}")
            return
        if answer.finished is not None:
            identities_hold(answer.finished.usage, answer.finished.tag)
        elif kind != "cancel":
            self.wrong.append(f"{kind}: no last message")

    def run(self, first: int, count: int, kill_draft_at: tuple[int, ...] = ()) -> None:
        with ThreadPoolExecutor(8) as pool:
            for i in range(first, first + count):
                pool.submit(self.one, i)
                if i - first in kill_draft_at:
                    self.stack.kill("draft")
                    self.stack.spawn("draft")
        self.stack.wait("draft")
        self.stack.wait_for_draft()
        free = self.stack.info().cache_tokens
        until(lambda: self.stack.info().free_cache_tokens == free, "all of the cache is free")


def held(stack: Stack, service: str) -> dict[str, float]:
    return stack.resources(service)


def test_500_mixed_requests_leave_nothing_behind(running: Stack) -> None:
    """Cancels, deadlines, bad input, sampled and whole answers, eight at a time, with the draft killed three times."""
    load = Load(running)
    load.run(0, 150, kill_draft_at=(70,))  # Warm: pools, buffers and allocators reach their size.
    before = {name: held(running, name) for name in ("target", "gateway")}
    load.run(1000, REQUESTS, kill_draft_at=(120, 260, 400))
    assert not load.wrong, load.wrong[:5]
    for name, then in before.items():
        now = held(running, name)
        assert now["fds"] <= then["fds"] + 2, f"{name}: descriptors {then['fds']} -> {now['fds']}"
        assert now["rss"] <= then["rss"] * 1.05, (
            f"{name}: resident {then['rss'] / 1e6:.0f} -> {now['rss'] / 1e6:.0f} MB"
        )
    assert not list(running.shared_memory.iterdir())
    assert running.metric("target", "slipstream_target_running_requests") == 0
    assert running.metric("target", "slipstream_target_waiting_requests") == 0
    assert running.metric("gateway", "slipstream_gateway_running_requests") == 0
    records = running.log_lines("gateway", event="usage")
    ids = {record["request_id"] for record in records}
    assert len(ids) == len(records) == 150 + REQUESTS, "each request leaves one usage record"


def test_memory_is_flat_with_speculation_off() -> None:
    """The gateway and target alone, standard decoding only: what is not used does not grow."""
    stack = Stack({"SLIPSTREAM_TARGET_SPECULATION": "off"})
    try:
        stack.start("target", "gateway")
        client = Client(stack.gateway_address)

        def ask(count: int) -> None:
            for i in range(count):
                client.generate(generate_request(PROMPTS[i % 48], max_tokens=4))

        ask(60)
        before = stack.resources("target")["rss"]
        ask(200)
        assert stack.resources("target")["rss"] <= before * 1.05
    finally:
        stack.stop()
