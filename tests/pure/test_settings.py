"""Where settings come from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import SettingsError
from app.settings import Settings, environment_name, load_settings


def load(
    tmp_path: Path, config: str = "", environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(config)
    return load_settings(flags, environ=environ or {}, config_file=file)


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings(environ={}, config_file=tmp_path / "absent.toml")

    assert (settings.host, settings.port, settings.api_key) == ("127.0.0.1", 11435, None)
    assert settings.hub_endpoints == ("https://huggingface.co",)
    assert settings.origin("port") == "default"


def test_each_layer_overrides_the_one_before(tmp_path: Path) -> None:
    config = "port = 1\nmax_queue = 1\nlog_level = 'debug'"
    environ = {"QUIRE_PORT": "2", "QUIRE_MAX_QUEUE": "2"}

    settings = load(tmp_path, config, environ, {"port": 3, "max_queue": None})

    assert (settings.port, settings.max_queue, settings.log_level) == (3, 2, "debug")
    assert settings.origin("port") == "command line"
    assert settings.origin("max_queue") == "environment QUIRE_MAX_QUEUE"
    assert settings.origin("log_level") == f"config file {tmp_path / 'config.toml'}"


def test_the_hub_may_have_a_table_of_its_own(tmp_path: Path) -> None:
    settings = load(tmp_path, "[hub]\nendpoint = 'https://a.example'\nmirrors = ['https://b.example']")

    assert settings.hub_endpoints == ("https://a.example", "https://b.example")
    assert settings.origin("hub_mirrors") == f"config file {tmp_path / 'config.toml'}"


def test_environment_names_of_the_hub_are_the_customary_ones(tmp_path: Path) -> None:
    environ = {
        "HF_ENDPOINT": "https://mirror.example",
        "HF_TOKEN": "t",
        "HF_HUB_OFFLINE": "on",
        "QUIRE_HUB_MIRRORS": "https://a.example, https://b.example",
        "QUIRE_HOME": "~/models",
    }

    settings = load(tmp_path, environ=environ)

    assert settings.hub_endpoints == ("https://mirror.example", "https://a.example", "https://b.example")
    assert (settings.hub_token, settings.hub_offline) == ("t", True)
    assert settings.data_root == Path.home() / "models"
    assert environment_name("api_key") == "QUIRE_API_KEY"


def test_empty_environment_variables_count_as_unset(tmp_path: Path) -> None:
    assert load(tmp_path, environ={"QUIRE_PORT": " "}).port == 11435


@pytest.mark.parametrize(
    ("config", "environ", "flags", "match"),
    [
        ("prot = 1", {}, {}, "Unknown setting 'prot'.*config.toml"),
        ("", {}, {"prot": 1}, "Unknown setting 'prot'.*command line"),
        ("port = 'x'", {}, {}, "port.*config.toml"),
        ("port = ", {}, {}, "cannot be read"),
        ("", {"QUIRE_PORT": "x"}, {}, "port.*environment QUIRE_PORT"),
        ("", {}, {"port": 70000}, "between 0 and 65535"),
        ("", {}, {"gpu_memory_utilization": 1.5}, "at most 1"),
        ("", {}, {"gpu_memory_utilization": float("nan")}, "at most 1"),
        ("", {}, {"max_num_seqs": 0}, "at least 1"),
        ("", {}, {"log_level": "loud"}, "log_level"),
        ("", {}, {"host": "0.0.0.0"}, "QUIRE_API_KEY"),
        ("", {"QUIRE_HOST": "192.168.1.5"}, {}, "environment QUIRE_HOST.*QUIRE_API_KEY"),
        ("origins = {}", {}, {}, "Unknown setting"),
        ("[hub]\nmirror = 'x'", {}, {}, "Unknown setting 'hub_mirror'"),
        ("hub = 'x'", {}, {}, "hub is not a table"),
    ],
)
def test_what_is_refused_names_its_origin(
    tmp_path: Path, config: str, environ: dict[str, str], flags: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        load(tmp_path, config, environ, flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_key(tmp_path: Path, host: str) -> None:
    assert load(tmp_path, flags={"host": host}).binds_loopback


def test_with_a_key_any_address_will_do(tmp_path: Path) -> None:
    assert load(tmp_path, flags={"host": "0.0.0.0", "api_key": "k"}).host == "0.0.0.0"


def test_settings_are_frozen(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        load(tmp_path).port = 1  # type: ignore[misc]
