"""Going on with a saved chat: which one `--continue` and `--chat` mean, and what is sent.  Used by `app.cli.run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.cli.failure import USAGE_EXIT_CODE, CommandFailure

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.schema.chats import ChatDetails


@dataclass(frozen=True, slots=True)
class Resume:
    """What the command line said: the chat of this id, or the model's last one, or neither."""

    is_last: bool = False
    chat_id: str | None = None

    def __post_init__(self) -> None:
        if self.is_last and self.chat_id is not None:
            raise CommandFailure("Give --continue or --chat, not both.", exit_code=USAGE_EXIT_CODE)

    async def find(self, client: QuireClient, model: str) -> ChatDetails | None:
        """The saved chat to go on with.  Raises `ClientError`, and `CommandFailure` where there is none."""
        if self.chat_id is not None:
            return await client.chats.get(self.chat_id)
        if not self.is_last:
            return None
        latest = await client.chats.list(model=model, limit=1)
        if not latest:
            raise CommandFailure(f"There is no saved chat with {model} yet; `quire chats` lists those with others.")
        return await client.chats.get(latest[0].id)


def conversation(resumed: ChatDetails | None, system: str | None, prompt: str) -> list[dict[str, str]]:
    """The messages to send: those of the saved chat, then the prompt; `system` goes before the saved one.

    A question that never got an answer gives way to the prompt.
    """
    said = [{"role": one.role, "content": one.content} for one in resumed.messages] if resumed else []
    if said and said[-1]["role"] == "user":
        said.pop()
    if system:
        said = [{"role": "system", "content": system}, *(one for one in said if one["role"] != "system")]
    return [*said, {"role": "user", "content": prompt}]
