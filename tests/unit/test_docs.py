"""The pages under docs/ are true: every module is on the map, and every test that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "gateway", "cli", "recipes", "bench")


def modules() -> set[str]:
    found = (
        path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".h", ".cpp")
    )
    return {str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"}


def test_the_map_has_a_line_for_every_module_and_no_other() -> None:
    mapped = re.findall(r"^\| `([^`]+\.(?:py|h|cpp))`", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE)
    assert sorted(mapped) == sorted(modules())


def test_every_test_that_the_behaviours_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "behaviours.md").read_text()))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named
    assert named <= defined, named - defined


def test_pages_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
