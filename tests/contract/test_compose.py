"""docker-compose.yml says what it should, and each service's very command runs with its very environment.

No container engine is needed: the file is checked against a schema of the parts of the compose specification that it uses, and
the commands run as processes, with the containers' paths and names replaced by ones of this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.serving.probe import is_serving
from tests.stack import Client, free_port, generate_request, until

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("draft", "target", "gateway")

DURATION = {"type": "string", "pattern": r"^\d+(s|m)$"}
STRINGS = {"type": "array", "items": {"type": "string"}}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "build": {"type": "object", "required": ["context", "target"], "additionalProperties": False,
                  "properties": {"context": {"type": "string"}, "target": {"type": "string"}}},
        "image": {"type": "string", "pattern": r"^[^:]+:v?\d+\.\d+\.\d+$"},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "volumes": STRINGS, "ports": STRINGS, "networks": STRINGS, "cap_drop": STRINGS, "security_opt": STRINGS, "tmpfs": STRINGS,
        "read_only": {"type": "boolean"},
        "user": {"type": "string"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "stop_grace_period": DURATION,
        "depends_on": {"type": "object", "additionalProperties": {
            "type": "object", "required": ["condition"],
            "properties": {"condition": {"enum": ["service_started", "service_healthy", "service_completed_successfully"]}}}},
        "healthcheck": {"type": "object", "required": ["test"], "additionalProperties": False,
                        "properties": {"test": STRINGS, "interval": DURATION, "timeout": DURATION, "start_period": DURATION}},
    },
    "oneOf": [{"required": ["build"]}, {"required": ["image"]}],
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["services", "volumes", "networks"],
    "patternProperties": {"^x-": {}},
    "properties": {
        "services": {"type": "object", "additionalProperties": SERVICE},
        "networks": {"type": "object"},
        "volumes": {"type": "object", "additionalProperties": {"type": ["object", "null"]}},
    },
    "additionalProperties": False,
}


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][name]
    return found


def mounts(name: str) -> dict[str, str]:
    return dict(v.split(":")[:2] for v in service(name).get("volumes", []))


def test_the_file_fits_the_schema() -> None:
    jsonschema.validate(COMPOSE, SCHEMA)


def test_every_volume_and_network_that_is_used_is_declared() -> None:
    for name in COMPOSE["services"]:
        assert set(service(name)["networks"]) <= set(COMPOSE["networks"])
        assert {source for source in mounts(name) if not source.startswith(".")} <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", OURS)
def test_services_run_without_privileges_on_a_read_only_root(name: str) -> None:
    assert service(name)["read_only"] is True
    assert service(name)["user"] == "10001:10001"
    assert service(name)["cap_drop"] == ["ALL"]


def test_only_target_and_draft_share_the_socket_and_the_memory() -> None:
    assert mounts("target") == mounts("draft")
    assert set(mounts("target")) == {"link", "tensors"}
    for name in ("gateway", "prometheus"):
        assert not set(mounts(name)) & {"link", "tensors"}
    for volume in ("link", "tensors"):
        options = COMPOSE["volumes"][volume]["driver_opts"]
        assert options["type"] == "tmpfs"
        assert re.search(r"size=\d+m,uid=10001,gid=10001,mode=0700", options["o"])


def test_each_image_is_a_stage_of_the_dockerfile_and_the_gateways_has_no_torch() -> None:
    stages = re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())
    names = {match.group(1): stage for stage in stages if (match := re.match(r"\S+ AS (\w+)", stage))}
    assert {service(name)["build"]["target"] for name in OURS} <= set(names)
    assert "torch" not in names["gateway"] + names["base"].split("COPY constraints")[1].replace("constraints.txt", "")


class Containers:
    """The services' commands as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = {name: free_port() for name in OURS}
        self.metrics = {name: free_port() for name in OURS}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> None:
        command = self._command(name)
        environment = {key: self._here(value) for key, value in service(name)["environment"].items()}
        environment[f"SLIPSTREAM_{name.upper()}_METRICS_PORT"] = str(self.metrics[name])
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command[1:]], env={**os.environ, **environment}, stdout=log, stderr=log, cwd=ROOT
            )
        self.processes.append(process)

    def healthy(self, name: str) -> bool:
        """The health check's very command."""
        test = service(name)["healthcheck"]["test"]
        assert test[:2] == ["CMD", "python"]
        done = subprocess.run([sys.executable, *map(self._here, test[2:])], cwd=ROOT, check=False)
        return done.returncode == 0

    @staticmethod
    def _command(name: str) -> list[str]:
        stage = re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())
        found = next(s for s in stage if re.match(rf"\S+ AS {name}\b", s))
        command: list[str] = yaml.safe_load(re.search(r"CMD (\[.*\])", found).group(1))  # type: ignore[union-attr]
        return command

    def _here(self, value: str) -> str:
        value = value.replace("/run/slipstream", str(self.folder / "link")).replace(
            "/run/tensors", str(self.folder / "tensors")
        )
        for name, number in (("draft", 50049), ("target", 50051), ("gateway", 50050)):
            value = re.sub(rf"(0\.0\.0\.0|127\.0\.0\.1|{name}):{number}", f"127.0.0.1:{self.port[name]}", value)
        return value

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    for volume in ("link", "tensors"):
        (tmp_path / volume).mkdir(mode=0o700)
    containers = Containers(tmp_path)
    yield containers
    containers.stop()


def test_the_commands_run_with_the_files_environment(containers: Containers) -> None:
    for name in OURS:
        containers.start(name)
    for name in OURS:
        until(lambda name=name: containers.healthy(name), f"{name}'s health check passes", 120)
    address = f"127.0.0.1:{containers.port['gateway']}"
    assert is_serving(address)
    client = Client(address)
    assert client.generate(generate_request("Hello", max_tokens=5)).error is None

    def speculates() -> bool:
        return client.generate(generate_request("Count to ten.", max_tokens=20)).tag.num_spec_steps > 0

    until(speculates, "target and draft meet in the shared folders", 30)
