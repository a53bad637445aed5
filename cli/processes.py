"""Draft, target and gateway as child processes: started in order, watched, restarted, stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from services.serving.probe import is_serving

PR_SET_PDEATHSIG = 1
RESTART_PAUSE_S = (0.5, 8.0)
COLOURS = {"draft": "green", "target": "cyan", "gateway": "magenta"}


@dataclass(frozen=True, slots=True)
class Service:
    """One of the three: how it is started, and where its health is asked."""

    name: str
    module: str
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)


def the_three(folder: Path) -> list[Service]:
    """Draft, target and gateway, wired together in a private folder; settings in the environment win."""

    def setting(name: str, default: str) -> str:
        return os.environ.get(name, default)

    socket = setting("SLIPSTREAM_DRAFT_SOCKET", str(folder / "draft.sock"))
    target = setting("SLIPSTREAM_TARGET_ADDRESS", "127.0.0.1:50051")
    gateway = setting("SLIPSTREAM_GATEWAY_ADDRESS", "127.0.0.1:50050")

    def ports(prefix: str, port: int) -> dict[str, str]:
        return {f"{prefix}_METRICS_PORT": setting(f"{prefix}_METRICS_PORT", str(port))}

    return [
        Service(
            "draft",
            "services.draft",
            f"unix:{socket}",
            {"SLIPSTREAM_DRAFT_SOCKET": socket, **ports("SLIPSTREAM_DRAFT", 9102)},
        ),
        Service(
            "target",
            "services.target",
            target,
            {
                "SLIPSTREAM_TARGET_ADDRESS": target,
                "SLIPSTREAM_TARGET_DRAFT": setting("SLIPSTREAM_TARGET_DRAFT", f"unix:{socket}"),
                **ports("SLIPSTREAM_TARGET", 9101),
            },
        ),
        Service(
            "gateway",
            "gateway",
            gateway,
            {
                "SLIPSTREAM_GATEWAY_ADDRESS": gateway,
                "SLIPSTREAM_GATEWAY_TARGET": setting("SLIPSTREAM_GATEWAY_TARGET", target),
                **ports("SLIPSTREAM_GATEWAY", 9100),
            },
        ),
    ]


class Supervisor:
    """Runs services until :meth:`stop`; each line they log goes to ``show`` with the service's name."""

    def __init__(self, services: list[Service], show: Callable[[str, str], None]) -> None:
        self._services = services
        self._show = show
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._stopping = threading.Event()
        self.asked_to_stop = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for service in self._services:
            thread = threading.Thread(target=self._keep_running, args=(service,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait_until_serving(self, timeout_s: float) -> bool:
        """Until all answer SERVING; False if one does not in time, or has given up."""
        deadline = time.monotonic() + timeout_s
        for service in self._services:
            while not is_serving(service.address):
                if time.monotonic() > deadline or self._stopping.is_set():
                    return False
                time.sleep(0.1)
            self._show(service.name, f"serving at {service.address}")
        return True

    def wait(self) -> None:
        """Until a stop is asked for, or a service cannot run."""
        self._stopping.wait()

    def request_stop(self) -> None:
        """Make :meth:`wait` return; for signal handlers."""
        self.asked_to_stop = True
        self._stopping.set()

    def stop(self) -> None:
        """End the services: gateway first, so that open streams can finish."""
        self._stopping.set()
        for service in reversed(self._services):
            process = self._processes.get(service.name)
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
        for thread in self._threads:
            thread.join(timeout=5)

    def _keep_running(self, service: Service) -> None:
        pause = RESTART_PAUSE_S[0]
        while not self._stopping.is_set():
            started = time.monotonic()
            code = self._run(service)
            if self._stopping.is_set():
                return
            if code == 2:  # Bad settings or a bad model: starting again would not help.
                self._show(service.name, "cannot run with these settings; see the lines above")
                self._stopping.set()
                return
            pause = RESTART_PAUSE_S[0] if time.monotonic() - started > 30 else min(2 * pause, RESTART_PAUSE_S[1])
            self._show(service.name, f"ended with code {code}; starts again in {pause:.1f} s")
            self._stopping.wait(pause)

    def _run(self, service: Service) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", service.module],
            env={**os.environ, **service.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is the supervisor's to handle
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no locks
        )
        self._processes[service.name] = process
        assert process.stdout is not None
        for line in process.stdout:
            self._show(service.name, line.rstrip())
        return process.wait()


def _die_with_parent() -> None:
    """However the supervisor ends, its children get SIGTERM (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def runtime_folder() -> Path:
    """A private folder for the draft's socket."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/slipstream-{os.getuid()}")
    return folder / "slipstream" if os.environ.get("XDG_RUNTIME_DIR") else folder


def show_prefixed(name: str, line: str) -> None:
    click.echo(f"{click.style(f'{name:>8} |', fg=COLOURS[name])} {line}")
