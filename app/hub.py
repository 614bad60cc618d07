"""From the settings of a person to those of the store: where models may be fetched from, with which token.

Called by the daemon for every pull, so that a login counts at once, and by commands that ask a hub themselves.
"""

from __future__ import annotations

from app.settings import Settings
from store.hub_settings import HubSettings
from store.hub_token import mirror_tokens, stored_token
from store.paths import user_paths

_MEMORY_FILE = "hub_reach.json"


def hub_settings(settings: Settings, *, is_offline: bool = False) -> HubSettings:
    """Reads the token files anew; `is_offline` can only add to what the settings say."""
    paths = user_paths()
    return HubSettings(
        endpoints=settings.hub_endpoints,
        offline=is_offline or settings.hub_offline,
        token=settings.hub_token or stored_token(),
        mirror_tokens=mirror_tokens(paths.config_dir),
        modelscope_endpoint=settings.modelscope_endpoint,
        modelscope_token=settings.modelscope_token,
        network_memory=paths.state_dir / _MEMORY_FILE,
    )
