"""Settings come from the environment; a bad one ends the service at once, by its variable's name."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = {"gateway": "GATEWAY", "services.target": "TARGET", "services.draft": "DRAFT"}


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


@pytest.mark.parametrize("module", MODULES)
def test_help_names_every_variable(module: str) -> None:
    done = run(module, "--help")
    assert done.returncode == 0
    assert f"SLIPSTREAM_{MODULES[module]}_METRICS_PORT" in done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_bad_value_is_told_by_its_variable(module: str) -> None:
    name = f"SLIPSTREAM_{MODULES[module]}_LOG_LEVEL"
    done = run(module, **{name: "loud"})
    assert done.returncode == 2
    assert done.stderr.startswith(name)
    assert "Traceback" not in done.stderr


def test_arguments_that_are_not_taken_are_refused() -> None:
    done = run("gateway", "--port", "1")
    assert done.returncode == 2
    assert "--port" in done.stderr


def test_the_gateway_and_the_command_line_start_without_torch() -> None:
    code = "import sys, gateway.__main__, cli.main, cli.generate, cli.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
