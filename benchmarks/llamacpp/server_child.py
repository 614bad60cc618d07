"""A `llama-server` binary over HTTP, as one contender's child process.

    python -m benchmarks.llamacpp.server_child        (commands on stdin: see `serving`)

One server with a slot for each sequence answers every task, as its users run it.  What HTTP and the reading
of up to 32 streams here cost is in its figures, so they favour Quire, which runs in process: prefer the
package where it can be installed.  Loading is from the start of the binary until it says that it is ready.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.llamacpp.serving import peak_rss_bytes, serve

READY_TIMEOUT_S = 600.0
_KV_SIZE = re.compile(r"KV buffer size\s*=\s*([\d.]+) MiB")
_NUM_TOKENS = re.compile(r"n_vocab\s*=\s*(\d+)")


def command_line(server: str, model: str, threads: int, shapes: list[list[int]], port: int) -> list[str]:
    """The server with enough slots and context for the largest of [number of sequences, tokens of each]."""
    slots = max(num_sequences for num_sequences, _ in shapes)
    context = slots * (-(-max(length for _, length in shapes) // 256) * 256)
    options = {"-m": model, "-t": threads, "-tb": threads, "-np": slots, "-c": context, "-b": 2048, "-ub": 512}
    return [server, *(str(part) for option in options.items() for part in option), "--port", str(port)]


class Stream:
    """One streamed completion; `arrivals` are the seconds from `started` to each of its tokens."""

    def __init__(self, port: int, prompt: list[int], max_tokens: int) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._body = json.dumps(
            {
                "prompt": prompt,
                "n_predict": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "stream": True,
            }
        )

    def arrivals(self, started: float) -> list[float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=READY_TIMEOUT_S)
        times: list[float] = []
        with contextlib.closing(connection):
            connection.request("POST", "/completion", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read().decode()}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    times += [time.perf_counter() - started] * len(event.get("tokens") or ())
        # Tokens that end within a character are held back, and may never have an event of their own.
        times += times[-1:] * (self._max_tokens - len(times))
        if len(times) != self._max_tokens:
            raise RuntimeError(f"llama-server sent {len(times)} tokens instead of {self._max_tokens}")
        return times


class Contender:
    """The commands of this child; `load` comes first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def load(self, model: str, threads: int, shapes: list[list[int]], server: str, **_: Any) -> dict[str, Any]:
        """Start the server and wait until it is ready."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115  It lives as long as the server.
        started = time.perf_counter()
        command = command_line(server, model, threads, shapes, self._port)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - started > READY_TIMEOUT_S:
                raise RuntimeError(f"llama-server did not get ready:\n{self._read_log()[-3000:]}")
            time.sleep(0.005)
        load_s = time.perf_counter() - started
        vocab = _NUM_TOKENS.search(self._read_log())
        return {
            "import_s": 0.0,
            "construct_s": load_s,
            "load_s": load_s,
            "vocab_size": int(vocab[1]) if vocab else None,
            "details": {"server": server},
        }

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Arrival times of every token, in seconds from the start of the run."""
        streams = [Stream(self._port, prompt, max_tokens) for prompt in prompts]
        with ThreadPoolExecutor(len(streams)) as pool:
            started = time.perf_counter()
            return list(pool.map(lambda stream: stream.arrivals(started), streams))

    def usage(self) -> dict[str, float]:
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        kv_mib = [float(found) for found in _KV_SIZE.findall(self._read_log())]
        return {
            "cpu_s": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            "peak_bytes": peak_rss_bytes(self._process.pid),
            "kv_bytes": round(sum(kv_mib) * 2**20),
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def _read_log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


if __name__ == "__main__":
    contender = Contender()
    try:
        serve({"load": contender.load, "run": contender.run, "usage": contender.usage})
    finally:
        contender.close()
