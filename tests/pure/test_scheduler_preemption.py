"""`Scheduler`: preemption by recompute, and steps scheduled before the tokens of earlier ones are known."""

from __future__ import annotations

from engine.api.output import StepOutput
from engine.core.scheduler import Scheduler
from tests.fakes.scheduling import TOKEN, add, commit, make_scheduler, schedule, step


class TestPreemption:
    def crowded(self) -> Scheduler:
        """Two sequences that fill a pool of 8 blocks while they generate."""
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        add(scheduler, 0, 8, max_tokens=20)
        add(scheduler, 1, 8, max_tokens=20)
        return scheduler

    def run_until_preemption(self, scheduler: Scheduler) -> None:
        while scheduler.stats().preemptions_total == 0:
            step(scheduler)

    def test_the_most_recent_arrival_gives_way_and_later_resumes_with_its_outputs(self) -> None:
        scheduler = self.crowded()
        self.run_until_preemption(scheduler)
        assert [s.sequence_id for s in scheduler._waiting] == [1]
        num_known = len(scheduler._sequences[1].token_ids)
        assert num_known > 8
        outputs: list[StepOutput] = []
        starts = []
        while scheduler.has_work:
            batch = schedule(scheduler)
            starts += batch.row_starts
            outputs += commit(scheduler, batch)
        (start,) = starts
        assert (start.sequence_id, start.num_prompt_tokens, len(start.token_ids)) == (1, 8, num_known)
        assert start.token_ids[8:] == (TOKEN,) * (num_known - 8)
        assert sum(len(o.token_ids) for o in outputs if o.sequence_id == 1) == 20 - (num_known - 8)

    def test_a_preempted_sequence_is_ahead_of_later_arrivals(self) -> None:
        scheduler = self.crowded()
        step(scheduler)
        add(scheduler, 2, 24)
        self.run_until_preemption(scheduler)
        assert [s.sequence_id for s in scheduler._waiting] == [1, 2]

    def test_the_oldest_gets_a_token_in_every_step(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        for sequence_id in range(6):
            add(scheduler, sequence_id, 4, max_tokens=28)
        for _ in range(28):
            assert 0 in {output.sequence_id for output in step(scheduler)}
        assert scheduler.stats().preemptions_total > 0

    def test_a_token_in_flight_survives_preemption(self) -> None:
        scheduler = self.crowded()
        in_flight = [schedule(scheduler)]
        while scheduler.stats().preemptions_total == 0:
            in_flight.append(schedule(scheduler))
            if scheduler.stats().preemptions_total == 0:
                commit(scheduler, in_flight.pop(0))
        preempted = scheduler._sequences[1]
        assert preempted.num_pending_tokens == 1
        outputs = commit(scheduler, in_flight.pop(0))
        assert {o.sequence_id for o in outputs} == {0, 1}
        assert preempted.num_pending_tokens == 0

    def test_a_preempted_sequence_starts_again_only_when_its_tokens_are_known(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        add(scheduler, 0, 8, max_tokens=20)
        add(scheduler, 1, 8, max_tokens=20)
        sequences = dict(scheduler._sequences)
        in_flight = [schedule(scheduler)]
        while scheduler.stats().preemptions_total == 0:
            in_flight.append(schedule(scheduler))
        scheduler.abort(0)
        assert sequences[1].num_pending_tokens == len(in_flight) - 1
        while sequences[1].num_pending_tokens:
            assert scheduler.schedule() is None
            commit(scheduler, in_flight.pop(0))
        (start,) = schedule(scheduler).row_starts
        assert start.token_ids == tuple(sequences[1].token_ids)

    def test_a_preempted_sequence_may_end_with_a_token_in_flight(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        add(scheduler, 0, 8, max_tokens=20)
        add(scheduler, 1, 8, max_tokens=20, stop_token_ids=(99,))
        in_flight = [schedule(scheduler)]
        while scheduler.stats().preemptions_total == 0:
            in_flight.append(schedule(scheduler))
        outputs = commit(scheduler, in_flight.pop(0), token_id=99)
        assert {o.sequence_id: o.finish_reason for o in outputs} == {0: None, 1: "stop"}
        assert scheduler.num_waiting == 0
        for batch in in_flight:
            assert [o.sequence_id for o in commit(scheduler, batch)] == [0]


class TestPipelining:
    def test_a_pending_token_is_computed_before_the_host_knows_it(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5)
        first, second = schedule(scheduler), schedule(scheduler)
        (decode,) = second.sequences
        assert (decode.start, decode.num_tokens, decode.samples) == (5, 1, True)
        assert [o.token_ids for o in commit(scheduler, first, 8) + commit(scheduler, second, 9)] == [(8,), (9,)]
        assert scheduler._sequences[0].token_ids[5:] == [8, 9]

    def test_nothing_is_scheduled_beyond_max_tokens(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5, max_tokens=2)
        batches = [schedule(scheduler), schedule(scheduler)]
        assert scheduler.schedule() is None
        assert [commit(scheduler, batch)[0].finish_reason for batch in batches] == [None, "length"]

    def test_nothing_is_scheduled_beyond_the_context(self) -> None:
        scheduler = make_scheduler(max_model_len=8)
        add(scheduler, 0, 6, max_tokens=100)
        batches = [schedule(scheduler), schedule(scheduler)]
        assert scheduler.schedule() is None
        assert [commit(scheduler, batch)[0].finish_reason for batch in batches] == [None, "length"]

    def test_a_sequence_that_has_ended_drops_what_was_in_flight(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5, stop_token_ids=(9,))
        first, second = schedule(scheduler), schedule(scheduler)
        assert commit(scheduler, first, 9)[0].finish_reason == "stop"
        assert scheduler.block_pool.num_free == 64
        assert commit(scheduler, second, 9) == []

    def test_an_aborted_sequence_drops_what_was_in_flight(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5)
        add(scheduler, 1, 5)
        batch = schedule(scheduler)
        scheduler.abort(0)
        assert [o.sequence_id for o in commit(scheduler, batch)] == [1]


class TestResize:
    def test_what_the_largest_open_sequence_may_need_remains(self) -> None:
        scheduler = make_scheduler(num_blocks=64)
        add(scheduler, 0, 5, max_tokens=6)
        add(scheduler, 1, 30, max_tokens=20)
        assert scheduler.least_blocks == 13
        assert scheduler.resize(0) == []
        assert (scheduler.block_pool.num_blocks, scheduler.max_model_len) == (13, 52)
        scheduler.abort(1)
        scheduler.resize(0)
        assert (scheduler.block_pool.num_blocks, scheduler.max_model_len) == (3, 12)

    def test_a_prompt_and_an_output_fit_in_any_case(self) -> None:
        assert make_scheduler().least_blocks == 1
        scheduler = make_scheduler(block_size=1)
        assert scheduler.least_blocks == 2
        scheduler.resize(0)
        add(scheduler, 0, 1)
        assert sum(len(output.token_ids) for output in step(scheduler)) == 1
        assert not scheduler.has_work

    def test_the_latest_arrivals_give_way_and_all_come_to_their_end(self) -> None:
        scheduler = make_scheduler(num_blocks=64)
        for sequence_id in range(4):
            add(scheduler, sequence_id, 16, max_tokens=8)
        step(scheduler)
        scheduler.resize(11)
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
        assert [sequence.sequence_id for sequence in scheduler._waiting] == [2, 3]
        ends = []
        while scheduler.has_work:
            ends += [output.sequence_id for output in step(scheduler) if output.finish_reason == "length"]
        assert sorted(ends) == [0, 1, 2, 3]
