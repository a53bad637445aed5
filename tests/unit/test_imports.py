"""Arrows between packages run one way (design section 3); the contracts stand in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def test_imports_run_one_way() -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_logo=True) == 0
