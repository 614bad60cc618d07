"""Slash commands of the chat: what counts as one, and the help text.

Pure; the chat screen carries them out.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Command(StrEnum):
    CLEAR = "/clear"
    HISTORY = "/history"
    HELP = "/help"
    BYE = "/bye"


ALIASES = {"/?": Command.HELP, "/exit": Command.BYE, "/quit": Command.BYE}

HELP = """\
/clear    begin a new conversation      Enter        send
/history  go on with a saved one        Ctrl+J       new line (also Shift+Enter)
/help     show this help                Up / Down    earlier prompts
/bye      leave                         Esc          stop the answer
                                        Ctrl+Q       leave (also Ctrl+C twice)"""

_LOOKS_LIKE_COMMAND = re.compile(r"/[a-z?]\w*")


class UnknownCommand(Exception):
    """The input is a slash word that means nothing; the message names the way out."""

    def __init__(self, text: str) -> None:
        super().__init__(f"There is no command {text}; /help lists those that exist.")


def parse_command(text: str) -> Command | None:
    """The command that `text` is, or None for an ordinary prompt.

    Only a single slash word counts, so paths such as `/etc/hosts` and sentences reach the
    model.  Raises `UnknownCommand`.
    """
    word = text.strip().lower()
    if not _LOOKS_LIKE_COMMAND.fullmatch(word):
        return None
    if word in ALIASES:
        return ALIASES[word]
    try:
        return Command(word)
    except ValueError:
        raise UnknownCommand(word) from None
