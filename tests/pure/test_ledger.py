"""The account of promised bytes adds up after every change, and refuses what would not."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.residency.arithmetic.ledger import Ledger, Overdrawn
from app.residency.arithmetic.tenants import DeviceShare

GIB = 2**30
GPU = DeviceShare("cuda:0", 24 * GIB, 0, 0.92)
NAMES = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.integers(-1, 60)


def test_a_promise_beyond_what_is_free_is_refused() -> None:
    ledger = Ledger()
    ledger.reserve("chat", GPU, 16 * GIB)
    with pytest.raises(Overdrawn, match=r"embedder would take 8\.6 GB of cuda:0, where 6\.5 GB are free"):
        ledger.reserve("embedder", GPU, 8 * GIB)
    assert "embedder" not in ledger
    assert ledger.held_bytes("cuda:0") == 16 * GIB


def test_one_name_has_one_entry() -> None:
    ledger = Ledger()
    ledger.reserve("chat", GPU, GIB)
    with pytest.raises(Overdrawn, match=r"already has an entry of 1\.1 GB"):
        ledger.reserve("chat", replace(GPU, name="cuda:1"), GIB)
    ledger.release("chat")
    with pytest.raises(Overdrawn, match="no entry"):
        ledger.release("chat")


def test_sleep_gives_bytes_back_and_waking_takes_them() -> None:
    ledger = Ledger()
    ledger.reserve("chat", GPU, 16 * GIB)
    ledger.sleep("chat", GIB)
    assert ledger.free_bytes(GPU) == int(24 * GIB * 0.92) - GIB
    with pytest.raises(Overdrawn, match="asleep"):
        ledger.sleep("chat", 2 * GIB)
    ledger.resize("chat", GPU, 14 * GIB)
    assert ledger.held_bytes("cuda:0") == ledger.held_by("chat") == 14 * GIB
    assert ledger.held_by("embedder") == 0


def test_other_programs_may_take_what_was_promised_but_nothing_is_promised_then() -> None:
    ledger = Ledger()
    ledger.reserve("chat", GPU, 16 * GIB)
    crowded = replace(GPU, others_bytes=10 * GIB)
    ledger.check([crowded])
    assert ledger.free_bytes(crowded) == int(24 * GIB * 0.92) - 26 * GIB
    with pytest.raises(Overdrawn):
        ledger.resize("chat", crowded, 17 * GIB)
    ledger.resize("chat", crowded, 15 * GIB)


def test_a_worker_that_holds_more_than_its_device_shows_in_the_check() -> None:
    ledger = Ledger()
    ledger.reserve("chat", GPU, 16 * GIB)
    ledger.correct("chat", 23 * GIB)
    with pytest.raises(Overdrawn, match=r"Models hold 24\.7 GB of cuda:0, whose limit is 23\.7 GB"):
        ledger.check([GPU])
    with pytest.raises(Overdrawn, match="which is not there"):
        ledger.check([])


class LedgerMachine(RuleBasedStateMachine):
    """Any calls in any order on two devices, beside an account kept by other means."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.devices = [DeviceShare("d0", 100, 0, 0.92), DeviceShare("d1", 50, 0, 0.92)]
        self.held: dict[str, tuple[int, int]] = {}

    @rule(name=NAMES, device=st.integers(0, 1), size=SIZES)
    def reserve(self, name: str, device: int, size: int) -> None:
        with contextlib.suppress(Overdrawn):
            self.ledger.reserve(name, self.devices[device], size)
            assert name not in self.held
            self.held[name] = (device, size)

    @rule(name=NAMES, size=SIZES)
    def resize(self, name: str, size: int) -> None:
        device = self.held.get(name, (0, 0))[0]
        with contextlib.suppress(Overdrawn):
            self.ledger.resize(name, self.devices[device], size)
            self.held[name] = (device, size)

    @rule(name=NAMES, size=SIZES)
    def sleep(self, name: str, size: int) -> None:
        with contextlib.suppress(Overdrawn):
            self.ledger.sleep(name, size)
            self.held[name] = (self.held[name][0], size)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        with contextlib.suppress(Overdrawn):
            self.ledger.release(name)
            del self.held[name]

    @rule(device=st.integers(0, 1), others=st.integers(0, 60))
    def other_programs_come_and_go(self, device: int, others: int) -> None:
        self.devices[device] = replace(self.devices[device], others_bytes=others)

    @invariant()
    def it_adds_up(self) -> None:
        self.ledger.check(self.devices)
        for index, device in enumerate(self.devices):
            held = sum(size for place, size in self.held.values() if place == index)
            assert self.ledger.held_bytes(device.name) == held <= device.limit_bytes
        assert {entry.name for entry in self.ledger} == set(self.held)


TestLedger = LedgerMachine.TestCase
