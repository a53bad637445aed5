"""``slipstream demo``: everything once, from nothing to a streamed answer with its tag."""

from __future__ import annotations

import sys
import time

import click
import grpc
from slipstream.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from cli.generate import build_request, stream, summary
from cli.processes import Supervisor, runtime_folder, show_prefixed, the_three

QUESTION = "Name five rivers in Africa and say one thing about each."
START_TIMEOUT_S = 600


@click.command("demo")
@click.option("--logs", is_flag=True, help="Show the services' logs.")
def command(logs: bool) -> None:
    """Start draft, target and gateway, stream an answer to a built-in question, print the tag, stop all three."""
    lines: list[tuple[str, str]] = []

    def show(name: str, line: str) -> None:
        lines.append((name, line))
        if logs or not line.startswith("{"):
            show_prefixed(name, line)

    services = the_three(runtime_folder())
    supervisor = Supervisor(services, show)
    click.echo("starting draft, target and gateway ...")
    supervisor.start()
    try:
        if not supervisor.wait_until_serving(START_TIMEOUT_S):
            for name, line in lines:
                show_prefixed(name, line)
            sys.exit("slipstream: the services did not start; their logs are above")
        _wait_for_draft(services[-1].address)
        click.echo(f"\n> {QUESTION}\n")
        answer = stream(build_request(QUESTION, max_tokens=160), services[-1].address, timeout=120)
        click.echo(f"\n\n{summary(answer)}\n")
    finally:
        supervisor.stop()
    click.echo("stopped draft, target and gateway")


def _wait_for_draft(address: str, timeout_s: float = 10.0) -> None:
    """Until the target has attached the draft; without it the answer would be standard, and say so."""
    deadline = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        while time.monotonic() < deadline:
            info = stub.GetInfo(gateway_pb2.GatewayServiceGetInfoRequest())
            if info.draft_state == common_pb2.FALLBACK_REASON_UNSPECIFIED:
                return
            time.sleep(0.1)
