"""Changes one setting in config.toml and leaves the rest as the person wrote it, comments included.

Reading is `app.settings`; called by the commands that remember a choice.
"""

from __future__ import annotations

import os
from pathlib import Path

from app.errors import SettingsError
from store.paths import CONFIG_NAME, user_paths


def config_file() -> Path:
    """Where settings are remembered."""
    return user_paths().config_dir / CONFIG_NAME


def remember_setting(name: str, value: str, *, file: Path | None = None) -> Path:
    """Write `name = value` into the config file in one step; the file.  Raises SettingsError."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    file = config_file() if file is None else file
    try:
        document = tomlkit.parse(file.read_text(encoding="utf-8") if file.exists() else "")
        document[name] = value
        _replace(file.resolve(), tomlkit.dumps(document))
    except (OSError, ValueError, TOMLKitError) as error:
        raise SettingsError(
            f"The config file {file} cannot be changed ({error}); correct it, or set {name} = '{value}' there yourself."
        ) from error
    return file


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with temporary.open("w", encoding="utf-8") as written:
            os.fchmod(written.fileno(), file.stat().st_mode & 0o777 if file.exists() else 0o600)
            written.write(text)
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
