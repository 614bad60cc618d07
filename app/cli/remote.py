"""Looking up a model that is not installed, with the words of a command.  Called by `quire show` and `quire plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.cli.output import notice

if TYPE_CHECKING:
    from app.settings import Settings
    from store.paths import DataRoot
    from store.remote_model import RemoteModel


def look_up(model: str, settings: Settings, root: DataRoot) -> RemoteModel:
    """What the sources say of a model; a failure says first that it is not installed."""
    from app.hub import hub_settings
    from store.errors import HubUnreachable
    from store.remote_model import look_up as look_up_remote

    hub = hub_settings(settings)
    try:
        return look_up_remote(model, root, hub, lambda progress: notice(progress.status), lambda: False)
    except HubUnreachable as error:
        if hub.offline:
            raise
        reason = error.message[:1].lower() + error.message[1:]
        raise HubUnreachable(f"{model} is not installed, and {reason}") from error
