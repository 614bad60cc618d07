"""Pulls that are killed with SIGKILL and started again: `benchmarks/kill_pull.py` in short."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.kill_pull import MIB, run_round

CONTENT = random.Random(5).randbytes(48 * MIB)


def test_killed_pulls_bring_the_right_bytes_and_few_of_them_twice(tmp_path: Path) -> None:
    chance = random.Random(9)
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run_round(CONTENT, folder, chance, drop_every_bytes=chance.randint(4, 40) * MIB, max_kills=1)
        assert done.is_identical
        assert done.sent_bytes - len(CONTENT) < 16 * MIB
