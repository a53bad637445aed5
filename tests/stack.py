"""Draft, target and gateway as real processes on free ports, for tests that ask the running system."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
from slipstream.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc, target_pb2, target_pb2_grpc

from services.serving.probe import is_serving

T = TypeVar("T")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], T], what: str, timeout_s: float = 60) -> T:
    """Ask until the answer is true. Fails with ``what`` otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


class Stack:
    """The three processes. Each writes its log to ``folder/NAME.log``."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipstream-test-"))
        self.shared_memory = Path(tempfile.mkdtemp(prefix="slipstream-test-", dir="/dev/shm"))
        self.socket = self.folder / "run" / "draft.sock"
        self.target_address = f"127.0.0.1:{free_port()}"
        self.gateway_address = f"127.0.0.1:{free_port()}"
        self.metrics = {name: free_port() for name in ("draft", "target", "gateway")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._settings = {
            "SLIPSTREAM_DRAFT_SOCKET": str(self.socket),
            "SLIPSTREAM_DRAFT_SHARED_MEMORY": str(self.shared_memory),
            "SLIPSTREAM_TARGET_ADDRESS": self.target_address,
            "SLIPSTREAM_TARGET_DRAFT": f"unix:{self.socket}",
            "SLIPSTREAM_TARGET_SHARED_MEMORY": str(self.shared_memory),
            "SLIPSTREAM_GATEWAY_ADDRESS": self.gateway_address,
            "SLIPSTREAM_GATEWAY_TARGET": self.target_address,
            **{f"SLIPSTREAM_{name.upper()}_METRICS_PORT": str(port) for name, port in self.metrics.items()},
            **{f"SLIPSTREAM_{name}_LOG_LEVEL": "debug" for name in ("DRAFT", "TARGET", "GATEWAY")},
            **(settings or {}),
        }

    def start(self, *names: str) -> Stack:
        """Start the named services (all three by default), and wait until each serves."""
        for name in names or ("draft", "target", "gateway"):
            self.spawn(name)
        for name in names or ("draft", "target", "gateway"):
            self.wait(name)
        return self

    def spawn(self, name: str) -> None:
        module = "gateway" if name == "gateway" else f"services.{name}"
        log = (self.folder / f"{name}.log").open("ab")
        environment = {**os.environ, **self._settings}
        self.processes[name] = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=log, stderr=log)

    def address(self, name: str) -> str:
        return {"draft": f"unix:{self.socket}", "target": self.target_address, "gateway": self.gateway_address}[name]

    def wait(self, name: str) -> None:
        def serving() -> bool:
            assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)[-2000:]}"
            return is_serving(self.address(name), 1)

        until(serving, f"{name} serves", 120)

    def wait_for_draft(self) -> None:
        """Until the target has attached the draft."""
        until(lambda: self.info().draft_state == common_pb2.FALLBACK_REASON_UNSPECIFIED, "the draft is attached")

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a service and wait until it is gone."""
        self.processes[name].send_signal(number)
        self.processes[name].wait(timeout=30)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def log_lines(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Lines of a service's log that have these fields."""
        lines = [json.loads(line) for line in self.log(name).splitlines() if line.startswith("{")]
        return [line for line in lines if all(line.get(key) == value for key, value in fields.items())]

    def metric(self, service: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[service]}/metrics", timeout=10).read().decode()
        total = 0.0
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(f'{key}="{wanted}"' in head for key, wanted in labels.items()):
                total += float(value)
        return total

    def resources(self, name: str) -> dict[str, float]:
        """What a process holds: descriptors, threads, resident bytes."""
        process = psutil.Process(self.processes[name].pid)
        return {"fds": process.num_fds(), "rss": process.memory_info().rss}

    def info(self) -> target_pb2.TargetServiceGetInfoResponse:
        with grpc.insecure_channel(self.target_address) as channel:
            return target_pb2_grpc.TargetServiceStub(channel).GetInfo(
                target_pb2.TargetServiceGetInfoRequest(), timeout=10
            )

    def stop(self) -> None:
        """End what still runs, gateway first, and remove the folders."""
        for name in ("gateway", "target", "draft"):
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for folder in (self.folder, self.shared_memory):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Answer:
    """What a caller of the gateway got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    chunks: int = 0
    started: gateway_pb2.GenerationStarted | None = None
    finished: gateway_pb2.GenerationFinished | None = None
    error: grpc.RpcError | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    trailer: dict[str, Any] = field(default_factory=dict)

    @property
    def tag(self) -> common_pb2.OptimizationTag:
        assert self.finished is not None
        return self.finished.tag


def chat(text: str) -> common_pb2.Prompt:
    return common_pb2.Prompt(chat=common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=text)]))


def generate_request(
    prompt: str | common_pb2.Prompt, mode: int = common_pb2.MODE_AUTO, max_tokens: int = 40, **fields: Any
) -> gateway_pb2.GatewayServiceGenerateRequest:
    stop = fields.pop("stop", None) or common_pb2.StopConditions(max_tokens=max_tokens)
    return gateway_pb2.GatewayServiceGenerateRequest(
        prompt=chat(prompt) if isinstance(prompt, str) else prompt, mode=mode, stop=stop, **fields
    )


class Client:
    """A caller of the gateway."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)

    def open(self, request: gateway_pb2.GatewayServiceGenerateRequest, timeout: float | None = 120) -> Any:
        return self.stub.Generate(request, timeout=timeout)

    def generate(self, request: gateway_pb2.GatewayServiceGenerateRequest, timeout: float | None = 120) -> Answer:
        """Read a stream to its end; an error is part of the answer."""
        call, answer = self.open(request, timeout), Answer()
        try:
            for message in messages(call, answer):
                del message
            answer.metadata = dict(call.initial_metadata())
        except grpc.RpcError as error:
            answer.error = error
        answer.trailer = dict(call.trailing_metadata() or ())
        return answer

    def close(self) -> None:
        self.channel.close()


def messages(call: Any, answer: Answer) -> Iterator[Any]:
    """The messages of a stream, gathered into ``answer`` as they come."""
    for message in call:
        match message.WhichOneof("message"):
            case "started":
                answer.started = message.started
            case "chunk":
                answer.chunks += 1
                answer.token_ids += message.chunk.token_ids
                answer.text += message.chunk.text
            case "finished":
                answer.finished = message.finished
        yield message


def identities_hold(usage: common_pb2.Usage, tag: common_pb2.OptimizationTag) -> None:
    """The identities of the tag (design section 4)."""
    histogram, origin = list(tag.acceptance_histogram), tag.tokens_by_origin
    assert sum(histogram) == tag.num_spec_steps
    assert sum(i * n for i, n in enumerate(histogram)) == tag.num_accepted_draft_tokens
    total = origin.accepted + origin.correction + origin.bonus + origin.standard + origin.early_exit
    assert total == usage.completion_tokens
