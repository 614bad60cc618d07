"""Does a pull that is killed again and again bring exactly the right bytes, and few of them twice?

    python benchmarks/kill_pull.py [--rounds 200] [--size-mb 200] [--seed 1]

Each round pulls a repository of one large file from the hub stand-in of the tests, which cuts every
connection short after some megabytes and at times answers 503.  The process that pulls is killed
(SIGKILL) one to three times, each time when the hub has sent a random share of the file; then one
is left to finish.  A round fails when the file is not byte for byte the hub's, or when the hub sent
1.2 times its size or more in all.  The last line is JSON; the exit status is 1 after a failed round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.fakes.hub import COMMIT, FakeHub, sha256  # noqa: E402  # the stand-in is found by the line above

MAX_RATIO = 1.2
TIMEOUT_S = 120.0
MIB = 1024 * 1024

CHILD = """
import sys
from store.paths import DataRoot
from store.pull import HubSettings, pull
pull("org/repo", DataRoot.open(sys.argv[2]), HubSettings(endpoints=(sys.argv[1],)), lambda _: None, lambda: False)
"""


@dataclass(frozen=True, slots=True)
class Round:
    """One killed and finished pull."""

    num_kills: int
    is_identical: bool
    sent_bytes: int
    size_bytes: int
    elapsed_s: float

    @property
    def ratio(self) -> float:
        """Bytes the hub sent per byte of the file."""
        return self.sent_bytes / self.size_bytes

    @property
    def is_good(self) -> bool:
        return self.is_identical and self.ratio < MAX_RATIO


def run_round(content: bytes, folder: Path, chance: random.Random, drop_every_bytes: int, max_kills: int = 3) -> Round:
    """Pull `content` into a data root below `folder`, with kills on the way."""
    num_kills = chance.randint(1, max_kills)
    thresholds = sorted(chance.randrange(len(content)) for _ in range(num_kills))
    began_s = time.monotonic()
    with FakeHub() as hub:
        hub.add("org/repo", {"config.json": b'{"model_type": "llama"}', "model.safetensors": content})
        hub.faults.drop_every_bytes = drop_every_bytes
        hub.faults.statuses = [None] * 8 + [chance.choice([None, 503]) for _ in range(4)]
        killed = 0
        for threshold in thresholds:
            killed += _kill_at(hub, folder, threshold, chance.random() * 0.05)
        subprocess.run(_command(hub, folder), env=_environment(), check=True, timeout=TIMEOUT_S)
        sent_bytes = hub.sent_bytes
    pulled = folder / "hub/models--org--repo/snapshots" / COMMIT / "model.safetensors"
    with pulled.open("rb") as file:
        is_identical = file.read() == content
    return Round(killed, is_identical, sent_bytes, len(content), time.monotonic() - began_s)


def _kill_at(hub: FakeHub, folder: Path, threshold: int, delay_s: float) -> int:
    """Start a pull and kill it soon after the hub has sent `threshold` bytes; 1 if it was alive then."""
    with subprocess.Popen(_command(hub, folder), env=_environment()) as child:
        deadline_s = time.monotonic() + TIMEOUT_S
        while hub.sent_bytes < threshold and child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.002)
        time.sleep(delay_s)
        was_alive = child.poll() is None
        child.kill()
    return int(was_alive)


def _command(hub: FakeHub, folder: Path) -> list[str]:
    return [sys.executable, "-P", "-c", CHILD, hub.endpoint, str(folder)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


def main() -> int:
    """Parse the options, run the rounds, print what stands out and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--size-mb", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", default=None, help="where the data roots are, one at a time")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    content = chance.randbytes(arguments.size_mb * 1_000_000)
    sha256(content)  # computed once, for all rounds
    rounds: list[Round] = []
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
            done = run_round(content, Path(directory), chance, drop_every_bytes=chance.randint(4, 48) * MIB)
        rounds.append(done)
        if not done.is_good or number % 10 == 0:
            verdict = "good" if done.is_good else "BAD"
            print(
                f"round {number}: {verdict}, {done.num_kills} kills, ratio {done.ratio:.3f}, {done.elapsed_s:.1f} s",
                flush=True,
            )
    num_bad = sum(not each.is_good for each in rounds)
    result = {
        "benchmark": "kill_pull",
        "rounds": len(rounds),
        "size_bytes": len(content),
        "kills": sum(each.num_kills for each in rounds),
        "identical": sum(each.is_identical for each in rounds),
        "bad": num_bad,
        "worst_ratio": round(max(each.ratio for each in rounds), 4),
        "median_ratio": round(statistics.median(each.ratio for each in rounds), 4),
        "median_s": round(statistics.median(each.elapsed_s for each in rounds), 2),
    }
    print(json.dumps(result))
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
