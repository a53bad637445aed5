"""Builds the pass: once per source, compiler flags and CPU, by torch's own extension builder."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-std=c++20",
    "-pthread",
    # Row-invariance: no re-ordering, no fusing but what the source says (see csrc/simd.h).
    "-fno-fast-math",
    "-ffp-contract=off",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c", "-mbmi2",
    "-mtune=native",
)  # fmt: skip
CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c", "bmi2"})


class BuildError(RuntimeError):
    """The pass could not be built, and why."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU, by Linux's names; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":")[1].split()) for line in lines if line.startswith("flags")), frozenset())


def why_not_here() -> str | None:
    """Why the fast pass cannot run on this machine, or None if it can."""
    missing = CPU_FLAGS - cpu_flags()
    if missing:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    if not _library().exists() and shutil.which("g++") is None:
        return "no C++ compiler (g++) and no build in the cache"
    return None


def cache_folder() -> Path:
    """Where builds are kept: SLIPSTREAM_CACHE, or the user's cache folder."""
    root = os.environ.get("SLIPSTREAM_CACHE")
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream" / "kernels"


def _key() -> str:
    import torch

    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, *FLAGS, *sorted(CPU_FLAGS & cpu_flags())):
        digest.update(part.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _name() -> str:
    return f"slipstream_pass_{_key()}"


def _library() -> Path:
    return cache_folder() / f"{_name()}.so"


@functools.cache
def load() -> ModuleType:
    """The compiled pass, built if it is not in the cache. Raises BuildError."""
    reason = why_not_here()
    if reason is not None:
        raise BuildError(reason)
    library = _library()
    if not library.exists():
        _build(library)
    spec = importlib.util.spec_from_file_location(_name(), library)
    if spec is None or spec.loader is None:
        raise BuildError(f"cannot load {library.name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    # ninja comes with the project's requirements and lies beside the interpreter, which need not be on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    folder = library.parent / f"{library.stem}.{os.getpid()}.build"
    folder.mkdir(parents=True)
    try:
        cpp_extension.load(
            name=_name(),
            sources=[str(SOURCES / "binding.cpp")],
            extra_cflags=list(FLAGS),
            extra_ldflags=["-pthread"],
            build_directory=str(folder),
        )
        os.replace(folder / f"{_name()}.so", library)
    except (RuntimeError, OSError) as error:
        raise BuildError(f"the build failed: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
