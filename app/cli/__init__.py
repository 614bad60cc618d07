"""The command `quire`.

`main` is the console entry and the process edge: every failure ends here as one sentence on
stderr and an exit code (0 done, 1 failed, 2 wrong usage, 130 interrupted).  Nothing is imported
before it is needed, so `quire --help` answers at once: modules of this package import typer and
the standard library at the top, everything else inside commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments`, by default those of the process; ends with SystemExit."""
    from app.cli.application import application
    from app.cli.failure import CommandFailure, failure_sentence
    from app.cli.output import notice, tolerate_any_streams

    tolerate_any_streams()
    try:
        application(arguments, prog_name="quire")
    except CommandFailure as failure:
        notice(failure.message)
        sys.exit(failure.exit_code)
    except Exception as error:  # noqa: BLE001  the process edge: no traceback leaves it
        notice(failure_sentence(error))
        sys.exit(1)
