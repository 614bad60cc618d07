"""`Settings`: what a person can choose, resolved once per process and then frozen.

Defaults < config.toml < environment < command-line flags; each value knows where it came
from (`settings.origin("port")`).  Called by the CLI and by `app.server`; reads files and
the environment, but opens nothing and starts nothing.
"""

from __future__ import annotations

import ipaddress
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from app.errors import SettingsError
from app.keep_alive import parse_keep_alive
from app.residency_settings import ResidentSettings, read_residents
from engine.api.config import LoadFormat, Quantization, WaitPolicy
from engine.api.errors import InvalidParameter
from store.paths import CONFIG_NAME, platform_data_root, user_paths

DEFAULT_PORT = 11435
_DURATIONS = ("keep_alive", "max_keep_alive")
LogLevel = Literal["debug", "info", "warning", "error"]

ENVIRONMENT_NAMES = {
    "data_root": "QUIRE_HOME",
    "hub_endpoint": "HF_ENDPOINT",
    "hub_token": "HF_TOKEN",
    "hub_offline": "HF_HUB_OFFLINE",
    "modelscope_endpoint": "MODELSCOPE_ENDPOINT",
    "modelscope_token": "MODELSCOPE_API_TOKEN",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the daemon; sizes in bytes, times in seconds, lengths in tokens.

    `memory_limit` is the share of each device that all models together may take, `gpu_memory_utilization` that of
    each model which names none of its own; None lets the planner choose.  `keep_alive` and `max_keep_alive` are
    `math.inf` for ever.  `residents` are loaded at start, in this order.  `max_queue` bounds the open requests of
    one model.  `allowed_hosts` are host names, beside the local ones, under which the daemon may be addressed.
    `load_format` "dummy" gives every model random weights: a directory with config.json and tokenizer.json is then
    enough to measure it.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    data_root: Path = msgspec.field(default_factory=platform_data_root)
    log_level: LogLevel = "info"

    hub_endpoint: str = "https://huggingface.co"
    hub_mirrors: tuple[str, ...] = ()
    hub_token: str | None = None
    hub_offline: bool = False
    modelscope_endpoint: str = "https://www.modelscope.cn"
    modelscope_token: str | None = None

    device: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    memory_limit: float = 0.92
    gpu_memory_utilization: float | None = None
    keep_alive: float = 30 * 60.0
    max_keep_alive: float = math.inf
    residents: tuple[ResidentSettings, ...] = ()
    num_threads: int | None = None
    pin_threads: bool = False
    wait_policy: WaitPolicy = "auto"

    save_chats: bool = True

    max_queue: int = 512
    request_body_limit_bytes: int = 32 * 2**20
    keep_alive_interval_s: float = 10.0
    worker_start_timeout_s: float = 1800.0
    worker_stop_timeout_s: float = 5.0

    origins: dict[str, str] = {}

    @property
    def hub_endpoints(self) -> tuple[str, ...]:
        """Where models are looked for, in this order."""
        return (self.hub_endpoint, *self.hub_mirrors)

    @property
    def binds_loopback(self) -> bool:
        return is_loopback(self.host)

    def origin(self, name: str) -> str:
        """Where the value of `name` was set, for messages: "default", "environment QUIRE_PORT", ..."""
        return self.origins.get(name, "default")


FIELD_NAMES = tuple(name for name in Settings.__struct_fields__ if name != "origins")
_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}


def environment_name(name: str) -> str:
    """The environment variable that sets the field `name`."""
    return ENVIRONMENT_NAMES.get(name, f"QUIRE_{name.upper()}")


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """Resolve all settings; flags that are None were not given.

    Raises `SettingsError` that names the setting and its origin.
    """
    environ = os.environ if environ is None else environ
    config_file = user_paths().config_dir / CONFIG_NAME if config_file is None else config_file
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = (
        {name: (value, f"config file {config_file}") for name, value in _read_config(config_file).items()},
        _from_environment(environ),
        {name: (value, "command line") for name, value in (flags or {}).items() if value is not None},
    )
    for layer in layers:
        for name, (raw, origin) in layer.items():
            values[name] = _convert(name, raw, origin)
            origins[name] = origin
    settings = Settings(**values, origins=origins)
    _check(settings)
    return settings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address of this name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            read = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"The config file {path} cannot be read ({error}); correct it or remove it.") from error
    # `[hub] mirrors = [...]` says the same as `hub_mirrors = [...]`.
    hub = read.pop("hub", {})
    if not isinstance(hub, dict):
        raise SettingsError(f"In the config file {path} hub is not a table; write hub_mirrors, or [hub] and mirrors.")
    read |= {f"hub_{name}": value for name, value in hub.items()}
    # `[[resident]]` is one of several; the setting is all of them.
    return read | ({"residents": read.pop("resident")} if "resident" in read else {})


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name in FIELD_NAMES:
        variable = environment_name(name)
        text = environ.get(variable, "").strip()
        if text:
            is_list = _FIELD_TYPES[name] == tuple[str, ...] or name == "residents"
            value = tuple(part.strip() for part in text.split(",") if part.strip()) if is_list else text
            found[name] = (value, f"environment {variable}")
    return found


def _convert(name: str, raw: Any, origin: str) -> Any:
    if name not in FIELD_NAMES:
        raise SettingsError(f"Unknown setting {name!r} ({origin}); known settings: {', '.join(FIELD_NAMES)}.")
    if name == "data_root":
        return Path(str(raw)).expanduser().absolute()
    if name == "residents":
        return read_residents(raw, origin)
    if name in _DURATIONS:
        return _convert_duration(name, raw, origin)
    if isinstance(raw, str) and _FIELD_TYPES[name] is bool:
        raw = {"yes": True, "on": True, "no": False, "off": False}.get(raw.lower(), raw)
    try:
        return msgspec.convert(raw, _FIELD_TYPES[name], strict=not isinstance(raw, str))
    except msgspec.ValidationError as error:
        raise SettingsError(f"The setting {name} ({origin}) is not usable: {error}; correct its value.") from error


def _convert_duration(name: str, raw: Any, origin: str) -> float:
    if not isinstance(raw, str | int | float):
        raise SettingsError(f'The setting {name} ({origin}) is not a duration; write it like "30m".')
    try:
        return parse_keep_alive(raw)
    except InvalidParameter as error:
        raise SettingsError(f"The setting {name} ({origin}) is not usable: {error.message}") from error


def _check(settings: Settings) -> None:
    def refuse(name: str, reason: str) -> None:
        value = getattr(settings, name)
        raise SettingsError(f"{name} = {value!r} ({settings.origin(name)}) is not usable: {reason}.")

    if not 0 <= settings.port <= 65535:
        refuse("port", "give a port between 0 and 65535")
    for name in ("memory_limit", "gpu_memory_utilization"):
        share = getattr(settings, name)
        if share is not None and not 0.0 < share <= 1.0:
            refuse(name, "give a fraction above 0 and at most 1")
    if settings.gpu_memory_utilization is not None and settings.gpu_memory_utilization > settings.memory_limit:
        refuse("gpu_memory_utilization", f"memory_limit allows all models together {settings.memory_limit:g}")
    for name in ("max_model_len", "max_num_seqs", "num_threads", "max_queue", "request_body_limit_bytes"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            refuse(name, "give at least 1")
    for name in ("keep_alive_interval_s", "worker_start_timeout_s", "worker_stop_timeout_s"):
        if not getattr(settings, name) > 0:
            refuse(name, "give a time above 0")
    if not settings.binds_loopback and not settings.api_key:
        refuse("host", "other machines could use it without a key, so set api_key (QUIRE_API_KEY) or bind to 127.0.0.1")
