"""The decisions of `packaging/install.py`: which torch, from where, and when pip may be left out."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLER = REPOSITORY / "packaging" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quire_install", INSTALLER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def project_torch_requirement() -> Requirement:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return next(found for found in map(Requirement, project["dependencies"]) if found.name == "torch")


def test_without_gpu_every_source_can_only_be_a_cpu_build(install: ModuleType) -> None:
    plan = install.plan_torch({}, "linux", gpu_present=False)
    assert plan.build == "cpu"
    assert [source.index_url for source in plan.sources] == [None, install.PYTORCH_CPU_INDEX]
    for source in plan.sources:
        specifier = Requirement(source.requirement).specifier
        assert not specifier.contains("2.13.0"), "the plain wheel depends on the CUDA packages"
        assert not specifier.contains("2.13.0+cu130")
        assert specifier.contains("2.13.0+cpu")


def test_a_foreign_index_needs_to_hold_torch_alone(install: ModuleType) -> None:
    configured, pytorch = install.plan_torch({}, "linux", gpu_present=False).sources
    assert configured.pip_arguments() == ["torch==2.13.0+cpu"]
    assert pytorch.pip_arguments() == ["--no-deps", "--index-url", install.PYTORCH_CPU_INDEX, "torch==2.13.0+cpu"]


def test_elsewhere_than_linux_the_plain_wheel_is_the_cpu_build(install: ModuleType) -> None:
    (source,) = install.plan_torch({}, "darwin", gpu_present=False).sources
    assert source == install.TorchSource("torch==2.13.0")


def test_with_gpu_the_cuda_build_is_taken_as_the_project_asks_for_it(install: ModuleType) -> None:
    plan = install.plan_torch({}, "linux", gpu_present=True)
    assert plan.build == "cuda"
    specifier = Requirement(plan.sources[0].requirement).specifier
    assert not specifier.contains("2.13.0+cpu")
    for version in ("2.10.1", "2.11.0", "2.12.1", "2.13.0", "2.13.0+cu130", "2.14.0"):
        assert specifier.contains(version) == project_torch_requirement().specifier.contains(version), version


def test_the_pinned_cpu_version_is_one_the_project_accepts(install: ModuleType) -> None:
    assert project_torch_requirement().specifier.contains(Version(install.CPU_TORCH_VERSION + "+cpu"))


@pytest.mark.parametrize(("choice", "gpu_present"), [("cpu", True), ("cuda", False)])
def test_the_choice_of_the_environment_outranks_detection(install: ModuleType, choice: str, gpu_present: bool) -> None:
    assert install.plan_torch({"QUIRE_TORCH": choice}, "linux", gpu_present).build == choice


def test_a_named_index_is_the_only_source(install: ModuleType) -> None:
    (source,) = install.plan_torch({"QUIRE_TORCH_INDEX": "https://mirror/cpu"}, "linux", gpu_present=False).sources
    assert source == install.TorchSource("torch==2.13.0", "https://mirror/cpu")


def test_an_unknown_build_is_refused(install: ModuleType) -> None:
    with pytest.raises(install.InstallError, match="must be cpu or cuda, not 'rocm'"):
        install.plan_torch({"QUIRE_TORCH": "rocm"}, "linux", gpu_present=False)


def test_the_gpu_extra_follows_the_build(install: ModuleType) -> None:
    everything = frozenset({"test", "gpu"})
    assert install.all_extras(frozenset({"dev"}), everything, "cpu") == {"dev", "test"}
    assert install.all_extras(frozenset(), frozenset(), "cuda") == {"gpu"}


def test_the_key_changes_with_whatever_the_environment_is_made_from(install: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("one")
    first = install.install_key(tmp_path, {}, "python 3.11", gpu_device_file=False)
    assert first == install.install_key(tmp_path, {"UNRELATED": "x"}, "python 3.11", gpu_device_file=False)
    others = {
        install.install_key(tmp_path, {}, "python 3.12", gpu_device_file=False),
        install.install_key(tmp_path, {}, "python 3.11", gpu_device_file=True),
        install.install_key(tmp_path, {"QUIRE_TORCH": "cpu"}, "python 3.11", gpu_device_file=False),
        install.install_key(tmp_path, {"QUIRE_TORCH_INDEX": "cpu"}, "python 3.11", gpu_device_file=False),
    }
    (tmp_path / "pyproject.toml").write_text("two")
    others.add(install.install_key(tmp_path, {}, "python 3.11", gpu_device_file=False))
    assert len(others | {first}) == 6


def test_a_stamp_covers_the_extras_it_has_and_no_more(install: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / install.STAMP_NAME
    install.Stamp("key", frozenset({"test"})).write(path)
    stamp = install.Stamp.read(path)
    assert stamp.covers("key", frozenset())
    assert stamp.covers("key", frozenset({"test"}))
    assert not stamp.covers("key", frozenset({"test", "dev"}))
    assert not stamp.covers("another", frozenset())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": "key"}', '{"key": "key", "extras": 3}'])
def test_a_damaged_stamp_covers_nothing(install: ModuleType, tmp_path: Path, text: str) -> None:
    path = tmp_path / install.STAMP_NAME
    path.write_text(text)
    assert not install.Stamp.read(path).covers("key", frozenset())


def test_an_environment_without_its_command_is_not_current(install: ModuleType, tmp_path: Path) -> None:
    environment = install.Environment(tmp_path)
    install.Stamp("key").write(environment.stamp_path)
    assert not environment.is_current("key", frozenset())
    environment.command.parent.mkdir()
    environment.command.touch()
    assert environment.is_current("key", frozenset())


def test_an_old_python_is_refused_in_a_sentence(install: ModuleType) -> None:
    with pytest.raises(install.InstallError, match=r"needs Python 3\.11 or newer and this is 3\.9"):
        install.check_python((3, 9, 2), [])


def test_a_python_without_venv_names_the_package_to_install(install: ModuleType) -> None:
    with pytest.raises(install.InstallError, match=r"sudo apt install python3\.12-venv"):
        install.check_python((3, 12, 1), ["ensurepip"])
    install.check_python((3, 12, 1), [])


def test_the_installer_parses_under_a_python_that_is_too_old() -> None:
    ast.parse(INSTALLER.read_text(), feature_version=(3, 7))


def test_a_full_disk_is_reported_before_anything_is_written(install: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(install.InstallError, match=r"has 0\.5 GB free; .*QUIRE_ENV"):
        install.check_free_space(tmp_path, "cpu", free_bytes=500_000_000)
    install.check_free_space(tmp_path, "cpu", free_bytes=100 * 10**9)


PROMPT = "it costs $5 and $(shell touch stolen) \"double\" 'single' `tick` \\n # x; a=b\nsecond line "


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_run_passes_the_prompt_untouched_and_fails_as_the_command_fails(tmp_path: Path) -> None:
    checkout, environment = tmp_path / "checkout", tmp_path / "with space"
    (checkout / "packaging").mkdir(parents=True)
    shutil.copy(REPOSITORY / "Makefile", checkout)
    (checkout / "packaging" / "install.py").write_text("")
    command = environment / "bin" / "quire"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s|" "$word"; done\ncat\nexit 7\n')
    command.chmod(0o755)
    variables = [f"PYTHON={sys.executable}", f"QUIRE_ENV={environment}"]

    def make_run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ["make", "-C", str(checkout), "run", *variables, *arguments]
        # Without the variables of a `make test` that this test may be running under.
        clean = {"PATH": os.environ["PATH"]}
        return subprocess.run(words, input="from stdin", env=clean, capture_output=True, text=True, check=False)

    asked = make_run(f"PROMPT={PROMPT}")
    assert f"run|starter|--|{PROMPT}|" in asked.stdout
    assert "from stdin" not in asked.stdout
    assert asked.returncode != 0
    assert not (checkout / "stolen").exists()
    assert "run|starter|from stdin" in make_run().stdout
