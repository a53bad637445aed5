"""The stubs are what protos/ gives, and need grpcio and protobuf only."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generating_again_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "stubs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_them_pulls_in_nothing_of_ours() -> None:
    code = (
        "import sys; from slipstream.v1 import common_pb2, draft_pb2_grpc, gateway_pb2_grpc, target_pb2_grpc; "
        "print({'services', 'gateway', 'cli', 'torch', 'numpy', 'pydantic', 'structlog'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_their_package_needs_grpcio_and_protobuf_only() -> None:
    project = tomllib.loads((ROOT / "stubs" / "pyproject.toml").read_text())["project"]
    assert [d.split(">")[0] for d in project["dependencies"]] == ["grpcio", "protobuf"]


def test_every_rpc_is_served() -> None:
    from slipstream.v1 import draft_pb2, gateway_pb2, target_pb2

    from gateway.servicer import GatewayServicer
    from services.draft.servicer import DraftServicer
    from services.target.servicer import TargetServicer

    servicers = {"GatewayService": GatewayServicer, "TargetService": TargetServicer, "DraftService": DraftServicer}
    for file in (draft_pb2, gateway_pb2, target_pb2):
        for name, service in file.DESCRIPTOR.services_by_name.items():
            for method in service.methods:
                assert method.name in vars(servicers[name]), f"{name}.{method.name}"
