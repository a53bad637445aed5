"""Generates stubs/slipstream from protos/. ``--check`` writes nothing and fails on a difference."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROTOS, STUBS = ROOT / "protos", ROOT / "stubs" / "slipstream"
TOOLCHAIN = {"grpcio-tools": "1.85.1", "mypy-protobuf": "5.1.0"}
"""Other versions generate other text."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for tool, version in TOOLCHAIN.items():
        found = importlib.metadata.version(tool)
        if found != version:
            sys.exit(f"stubs: {tool} {version} is needed, {found} is installed")
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        differing = compare(fresh, STUBS)
        if check:
            for name in differing:
                print(f"stubs: {name} differs from protos/; run `make stubs`", file=sys.stderr)
            return 1 if differing else 0
        shutil.rmtree(STUBS, ignore_errors=True)
        shutil.copytree(fresh, STUBS)
    print(f"stubs: {len(differing)} files changed")
    return 0


def generate(folder: Path) -> Path:
    """Generate into ``folder``; returns the package's folder."""
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")] + [
        f"--mypy_grpc_out=quiet:{folder}"
    ]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS), *outputs, *protos]
    subprocess.run(command, check=True, env=environment)
    package = folder / "slipstream"
    for inner in (package, package / "v1"):
        (inner / "__init__.py").touch()
    (package / "py.typed").touch()
    return package


def compare(left: Path, right: Path) -> list[str]:
    """Files that are in one folder only, or differ."""

    def content(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    a, b = content(left), content(right)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


if __name__ == "__main__":
    sys.exit(main())
