"""How long does a verified pull of a large file take, against `curl` followed by `sha256sum`?

    python benchmarks/pull.py [--size-mb 2000] [--rounds 3] [--dir DIR] [--connections 4]

A server in a process of its own serves one file of random bytes over loopback, with ranges.  Each
round fetches it twice into DIR (a temporary directory unless given): with `curl` and `sha256sum`
one after the other, and with the store's downloader, which hashes while bytes arrive and puts them
on the disk.  The ratio is the median of the rounds' own ratios.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from store.names import Digest
from store.progress import Reporter
from store.transfer import Credentials, Downloader, RemoteFile, RetryPolicy, TransferShape

BLOCK_BYTES = 16 * 1024 * 1024


def write_source(path: Path, size_bytes: int) -> str:
    """A file no two blocks of which are alike; its sha256."""
    block = bytearray(random.Random(1).randbytes(BLOCK_BYTES))
    state = hashlib.sha256()
    with path.open("wb") as file:
        for number in range(-(-size_bytes // BLOCK_BYTES)):
            block[:8] = number.to_bytes(8, "little")
            piece = memoryview(block)[: min(BLOCK_BYTES, size_bytes - number * BLOCK_BYTES)]
            file.write(piece)
            state.update(piece)
    return state.hexdigest()


def serve(path: str) -> None:
    """Serve `path` at any address, with ranges, by sendfile: the server shall not be what is measured."""
    descriptor = os.open(path, os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer_requests, args=(connection, descriptor), daemon=True).start()


def answer_requests(connection: socket.socket, descriptor: int) -> None:
    """Every request of one connection."""
    size_bytes = os.fstat(descriptor).st_size
    with connection, connection.makefile("rb") as lines:
        while lines.readline():
            asked = None
            while header := lines.readline().strip():
                if header.lower().startswith(b"range: bytes="):
                    asked = header.split(b"=")[1].split(b"-")
            start = int(asked[0]) if asked else 0
            end = int(asked[1]) + 1 if asked and asked[1] else size_bytes
            head = (
                f"HTTP/1.1 {'206 Partial Content' if asked else '200 OK'}\r\nContent-Length: {end - start}\r\n"
                f"Content-Range: bytes {start}-{end - 1}/{size_bytes}\r\n\r\n"
            )
            try:
                connection.sendall(head.encode())
                while start < end:
                    start += os.sendfile(connection.fileno(), descriptor, start, end - start)
            except OSError:
                return


def time_curl(url: str, folder: Path, digest: str) -> float:
    target = folder / "curl.bin"
    began_s = time.perf_counter()
    subprocess.run(["curl", "--silent", "--fail", "--output", str(target), url], check=True)
    hashed = subprocess.run(["sha256sum", str(target)], check=True, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - began_s
    assert hashed.stdout.split()[0] == digest
    target.unlink()
    return elapsed_s


def time_pull(url: str, folder: Path, digest: str, size_bytes: int, shape: TransferShape) -> float:
    reporter = Reporter(lambda _: None, lambda: False)
    file = RemoteFile("file.bin", (url,), size_bytes, Digest(digest))
    began_s = time.perf_counter()
    with Downloader(reporter, credentials=Credentials(), policy=RetryPolicy(), shape=shape) as downloader:
        downloader.fetch([file], folder, lambda fetched: fetched.path.rename(folder / "pulled.bin"))
    elapsed_s = time.perf_counter() - began_s
    (folder / "pulled.bin").unlink()
    return elapsed_s


def main() -> None:
    """Parse the options, run the rounds, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where the files are written")
    parser.add_argument("--connections", type=int, default=TransferShape().connections)
    arguments = parser.parse_args()
    size_bytes = arguments.size_mb * 1_000_000
    shape = TransferShape(connections=arguments.connections)
    rounds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        folder = Path(directory)
        source = folder / "source.bin"
        digest = write_source(source, size_bytes)
        command = [sys.executable, __file__, "--serve", str(source)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = f"http://127.0.0.1:{int(server.stdout.readline())}/file.bin"
                print("round  curl + sha256sum  pull, verified  ratio")
                for number in range(arguments.rounds):
                    curl_s = time_curl(url, folder, digest)
                    pull_s = time_pull(url, folder, digest, size_bytes, shape)
                    rounds.append((curl_s, pull_s))
                    print(f"{number + 1:5}  {curl_s:14.2f} s  {pull_s:12.2f} s  {pull_s / curl_s:5.2f}", flush=True)
            finally:
                server.kill()
    result = {
        "benchmark": "pull",
        "size_bytes": size_bytes,
        "connections": shape.connections,
        "curl_sha256sum_s": round(statistics.median(curl_s for curl_s, _ in rounds), 2),
        "pull_s": round(statistics.median(pull_s for _, pull_s in rounds), 2),
        "ratio": round(statistics.median(pull_s / curl_s for curl_s, pull_s in rounds), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        main()
