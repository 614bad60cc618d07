"""What is said of a sleep stays true, whatever fails on the way there or back."""

from __future__ import annotations

import pytest

from engine.api.errors import EngineAsleep, InsufficientMemory
from engine.holdings import Holdings

HELD_AWAKE, HELD_ASLEEP, IN_RAM = 100, 7, 60


class FakeWeights:
    """Notes what is asked of it; `fails` are the calls that raise."""

    mapped_bytes = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: set[str] = set()

    def sleep(self) -> int:
        self._note("sleep")
        return IN_RAM

    def wake(self) -> None:
        self._note("wake")

    def settle(self) -> None:
        self._note("settle")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise InsufficientMemory(f"no memory to {call}")


def held(holdings: Holdings) -> tuple[bool, int, int, int]:
    memory = holdings.memory(num_kv_blocks=5, max_model_len=80)
    assert memory.max_model_len == 80
    return memory.is_asleep, memory.num_kv_blocks, memory.fixed_bytes, memory.host_bytes


def wake(holdings: Holdings, *, cache_fails: bool = False) -> None:
    with holdings.waking():
        if cache_fails:
            raise InsufficientMemory("no memory for the cache")


AWAKE = (False, 5, HELD_AWAKE, 0)
ASLEEP = (True, 0, HELD_ASLEEP, IN_RAM)


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights()


@pytest.fixture
def holdings(weights: FakeWeights) -> Holdings:
    return Holdings(weights, HELD_AWAKE, lambda: HELD_ASLEEP)


def test_there_and_back(holdings: Holdings, weights: FakeWeights) -> None:
    holdings.require_awake()
    assert held(holdings) == AWAKE
    holdings.sleep()
    assert held(holdings) == ASLEEP
    with pytest.raises(EngineAsleep, match="wake it first"):
        holdings.require_awake()
    with holdings.waking():
        assert weights.calls == ["sleep", "wake"]
        assert held(holdings) == ASLEEP
    assert weights.calls == ["sleep", "wake", "settle"]
    assert held(holdings) == AWAKE


def test_weights_that_cannot_leave_are_awake(holdings: Holdings, weights: FakeWeights) -> None:
    weights.fails = {"sleep"}
    with pytest.raises(InsufficientMemory):
        holdings.sleep()
    assert held(holdings) == AWAKE


def test_weights_that_cannot_come_back_sleep_on(holdings: Holdings, weights: FakeWeights) -> None:
    holdings.sleep()
    weights.fails = {"wake"}
    with pytest.raises(InsufficientMemory, match="to wake"), holdings.waking():
        pytest.fail("there are no weights to go on with")
    assert held(holdings) == ASLEEP


def test_what_fails_beside_the_weights_sends_them_back(holdings: Holdings, weights: FakeWeights) -> None:
    holdings.sleep()
    with pytest.raises(InsufficientMemory, match="for the cache"):
        wake(holdings, cache_fails=True)
    assert weights.calls == ["sleep", "wake", "sleep"]
    assert held(holdings) == ASLEEP


@pytest.mark.parametrize("last", ["sleep", "settle"])
def test_weights_that_neither_stay_nor_leave_are_not_called_awake(
    holdings: Holdings, weights: FakeWeights, last: str
) -> None:
    holdings.sleep()
    weights.fails = {last}
    with pytest.raises(InsufficientMemory, match=f"to {last}"):
        wake(holdings, cache_fails=last == "sleep")
    assert held(holdings) == ASLEEP
    weights.fails = set()
    wake(holdings)
    assert held(holdings) == AWAKE
