"""Rules of the repository that no linter checks: sizes, names, docstrings, layers, what an import may load."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.application import application
from app.settings import FIELD_NAMES, environment_name

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "engine", "store", "tui")
TOP_LEVEL_FOLDERS = (*PACKAGES, "packaging", "tests", "benchmarks", "docs")
GENERIC_NAMES = {"common", "data", "helper", "helpers", "manager", "misc", "shared", "util", "utils"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

MODULES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_top_level_folder_is_there() -> None:
    assert [name for name in TOP_LEVEL_FOLDERS if not (REPOSITORY / name).is_dir()] == []


def test_packaging_does_not_shadow_the_library_of_that_name() -> None:
    assert not (REPOSITORY / "packaging" / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_small_named_for_its_job_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert path.stem not in GENERIC_NAMES
    long_functions = {
        node.name: node.end_lineno - node.lineno + 1
        for node in functions_of(tree)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long_functions == {}
    is_empty_package = path.name == "__init__.py" and not text.strip()
    assert is_empty_package or ast.get_docstring(tree), "a module begins with a docstring"


@pytest.mark.parametrize("module", ["app.server", "app.cli", "tui.app", "store.models", "engine.api", "engine.core"])
def test_importing_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr


def test_the_readme_names_every_setting() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    names = [name for field in FIELD_NAMES for name in (field, environment_name(field))]
    assert [name for name in names if f"`{name}`" not in readme] == []


def test_the_readme_names_every_command() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    names = [command.name for command in application.registered_commands]
    for group in application.registered_groups:
        assert group.typer_instance is not None
        names += [f"{group.name} {command.name}" for command in group.typer_instance.registered_commands]
    assert "run" in names
    assert "disk move" in names
    assert [name for name in names if f"`quire {name}" not in readme] == []


def test_the_layers_hold() -> None:
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if lint_imports is None:
        pytest.skip("import-linter is not installed; `make lint` installs it and checks the same contracts")
    found = subprocess.run(
        [lint_imports, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
