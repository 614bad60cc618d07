"""`python -m app.cli` is `quire`; the daemon is started this way."""

from app.cli import main

main()
