"""The version of the installed distribution, as the CLI, `/version` and fingerprints show it."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("quire-llm")
FINGERPRINT = f"quire-{VERSION}"
