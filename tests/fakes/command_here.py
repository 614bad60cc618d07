"""The command `quire` within the test's own process, where parts of it can be replaced."""

from __future__ import annotations

import pytest

from app.cli import main


def quire(*arguments: str) -> int:
    """Run the command; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code
