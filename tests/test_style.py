"""Linters, and the rules that no linter knows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "solgen": {"solgen", "engine", "parallel", "presets"},
    "engine": {"engine", "kernels", "parallel", "presets"},
    "kernels": {"kernels"},
    "parallel": {"parallel"},
    "presets": {"presets"},
}


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_linters_are_clean(command: list[str]) -> None:
    pytest.importorskip(command[0], reason="the dev extra brings it")
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py" if folder == "solgen" else "**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                parts = module.split(".")
                if parts[0] == "solgen" and len(parts) > 1 and parts[1] in ALLOWED:
                    assert parts[1] in ALLOWED[folder], f"{path.relative_to(ROOT)} imports {module}"


def test_the_readme_is_short_and_begins_with_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    first, second = (part.split("```")[0] for part in text.split("```sh\n")[1:3])
    assert "solgen generate --preset demo" in first
    assert "pytest" in second
