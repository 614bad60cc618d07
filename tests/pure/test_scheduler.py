"""`Scheduler`: limits, token budget, blocks, prefix sharing and how sequences end, one situation at a time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api.errors import ContextLengthExceeded, InvalidParameter
from engine.api.output import StepOutput, TokenLogprobs
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams
from engine.core.batch import SampledTokens
from engine.core.waiting_queue import MAX_BYPASSES
from tests.fakes.scheduling import TOKEN, add, commit, make_scheduler, schedule, shares, step


class TestLimits:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
            ({"block_size": 0}, "block_size must be at least 1"),
            ({"max_model_len": 1}, "at least 2"),
            ({"num_blocks": 1, "block_size": 1}, "One block of one token"),
            ({"enable_chunked_prefill": False}, "raise max_num_batched_tokens from 64 to max_model_len 256"),
        ],
    )
    def test_config_that_cannot_work_is_refused(self, overrides: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_scheduler(**overrides)

    def test_prompt_without_room_for_an_output_is_refused(self) -> None:
        scheduler = make_scheduler()
        with pytest.raises(ContextLengthExceeded) as caught:
            add(scheduler, 1, 256)
        assert (caught.value.needed_tokens, caught.value.available_tokens) == (257, 256)
        add(scheduler, 1, 255)

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [
            (Prompt(1, (), 1, SamplingParams()), "prompt"),
            (Prompt(1, (5,), 0, SamplingParams()), "max_tokens"),
            (Prompt(0, (5,), 1, SamplingParams()), "sequence_id"),
        ],
    )
    def test_prompt_that_cannot_run_is_refused(self, prompt: Prompt, param: str) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 3)
        with pytest.raises(InvalidParameter) as caught:
            scheduler.add(prompt)
        assert caught.value.param == param
        assert scheduler.num_waiting == 1

    def test_rows_bound_the_running_sequences(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for sequence_id in range(3):
            add(scheduler, sequence_id, 4)
        assert shares(schedule(scheduler)) == {0: 4, 1: 4}
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)

    def test_a_budget_below_max_num_seqs_still_serves_every_running_sequence(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=3)
        for sequence_id in range(5):
            add(scheduler, sequence_id, 1)
        for _ in range(3):
            batch = schedule(scheduler)
            assert scheduler.num_running == 3, "no sequence holds blocks and a row without getting a token"
            assert shares(batch).keys() == {0, 1, 2}


class TestTokenBudget:
    def test_a_long_prompt_is_cut_at_block_boundaries_and_samples_once(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=30)
        add(scheduler, 0, 70)
        batches = [schedule(scheduler) for _ in range(3)]
        parts = [(s.start, s.num_tokens, s.samples) for batch in batches for s in batch.sequences]
        assert parts == [(0, 28, False), (28, 28, False), (56, 14, True)]
        assert [len(batch.row_starts) for batch in batches] == [1, 0, 0]

    def test_a_budget_below_a_block_is_used(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=3)
        add(scheduler, 0, 8)
        assert [schedule(scheduler).num_tokens for _ in range(3)] == [3, 1, 3]

    def test_decodes_come_first_and_prefills_get_the_rest(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=34)
        add(scheduler, 0, 5)
        step(scheduler)
        add(scheduler, 1, 100)
        batch = schedule(scheduler)
        assert [(s.sequence_id, s.num_tokens) for s in batch.sequences] == [(0, 1), (1, 32)]
        assert batch.num_decodes == 1

    def test_a_short_prompt_is_not_held_back_by_long_ones(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 200)
        add(scheduler, 1, 200)
        step(scheduler)
        add(scheduler, 2, 20)
        outputs = step(scheduler)
        assert [output.sequence_id for output in outputs] == [2]

    def test_the_oldest_prefill_keeps_half_of_the_budget(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 200)
        for sequence_id in range(1, 8):
            add(scheduler, sequence_id, 20)
        assert shares(schedule(scheduler))[0] >= 32

    def test_equal_prompts_are_finished_in_order_instead_of_all_late(self) -> None:
        scheduler = make_scheduler()
        for sequence_id in range(4):
            add(scheduler, sequence_id, 64)
        first_tokens = [{output.sequence_id for output in step(scheduler)} for _ in range(2)]
        assert first_tokens == [set(), {0, 1}]

    def test_without_chunks_a_prompt_is_computed_whole(self) -> None:
        scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=256, num_blocks=128)
        add(scheduler, 0, 200)
        add(scheduler, 1, 100)
        assert shares(schedule(scheduler)) == {0: 200}
        assert shares(schedule(scheduler)) == {0: 1, 1: 100}

    def test_without_chunks_decodes_make_room_for_a_prompt_that_would_never_fit_beside_them(self) -> None:
        scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=256, num_blocks=128)
        for sequence_id in range(4):
            add(scheduler, sequence_id, 4)
        step(scheduler)
        add(scheduler, 4, 255)
        assert shares(schedule(scheduler)) == {0: 1, 1: 1, 2: 1, 3: 1}
        assert shares(schedule(scheduler)) == {0: 1, 4: 255}


class TestBlocks:
    def test_a_row_hears_of_each_block_once(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 6)
        batch = schedule(scheduler)
        (update,) = batch.block_updates
        assert (update.row, update.first_index, len(update.block_ids)) == (batch.row_starts[0].row, 0, 2)
        commit(scheduler, batch)
        updates = []
        for _ in range(4):
            batch = schedule(scheduler)
            updates.append([(u.first_index, len(u.block_ids)) for u in batch.block_updates])
            commit(scheduler, batch)
        assert updates == [[], [], [(2, 1)], []]

    def test_a_finished_sequence_gives_its_blocks_back_at_once(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 9, max_tokens=1)
        assert step(scheduler)[0].finish_reason == "length"
        assert scheduler.block_pool.num_free == 64
        assert not scheduler.has_work
        assert scheduler.schedule() is None

    def test_admission_leaves_a_block_for_each_running_sequence(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        add(scheduler, 0, 16)
        add(scheduler, 1, 16)
        schedule(scheduler)
        assert scheduler.num_running == 1
        scheduler = make_scheduler(num_blocks=9, max_model_len=32)
        add(scheduler, 0, 16)
        add(scheduler, 1, 16)
        schedule(scheduler)
        assert scheduler.num_running == 2

    def test_a_sequence_of_the_whole_pool_runs_alone(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_model_len=32)
        add(scheduler, 0, 31)
        (output,) = step(scheduler)
        assert output.finish_reason == "length"

    def test_a_small_sequence_passes_a_blocked_one_a_bounded_number_of_times(self) -> None:
        scheduler = make_scheduler(num_blocks=16, max_model_len=64)
        add(scheduler, 0, 4, max_tokens=60)
        step(scheduler)
        add(scheduler, 1, 60)
        started = []
        for sequence_id in range(2, 40):
            add(scheduler, sequence_id, 3, max_tokens=1)
            batch = schedule(scheduler)
            started += [start.sequence_id for start in batch.row_starts]
            commit(scheduler, batch)
        assert started == [*range(2, 2 + MAX_BYPASSES)]
        while 1 not in started:
            batch = schedule(scheduler)
            started += [start.sequence_id for start in batch.row_starts]
            commit(scheduler, batch)
        assert started[MAX_BYPASSES] == 1, "nobody else passes it before it starts"


class TestEnds:
    def test_a_stop_token_ends_the_sequence_and_is_its_last_token(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5, stop_token_ids=(8, 9), max_tokens=2)
        assert step(scheduler, 7)[0].finish_reason is None
        (output,) = step(scheduler, 9)
        assert (output.token_ids, output.finish_reason, output.stop_token_id) == ((9,), "stop", 9)

    def test_a_stop_token_does_not_count_until_min_tokens_precede_it(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5, stop_token_ids=(9,), min_tokens=2)
        assert [step(scheduler, 9)[0].finish_reason for _ in range(3)] == [None, None, "stop"]

    def test_max_tokens_and_the_context_end_with_length(self) -> None:
        scheduler = make_scheduler(max_model_len=8)
        add(scheduler, 0, 5, max_tokens=2)
        add(scheduler, 1, 5, max_tokens=50)
        ends = [{o.sequence_id: o.finish_reason for o in step(scheduler)} for _ in range(3)]
        assert ends == [{0: None, 1: None}, {0: "length", 1: None}, {1: "length"}]

    def test_abort_frees_at_once_and_answers_once(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5)
        add(scheduler, 1, 5)
        step(scheduler)
        assert scheduler.abort(0) == StepOutput(0, finish_reason="abort")
        assert scheduler.abort(0) is None
        assert scheduler.block_pool.num_free == 62
        assert shares(schedule(scheduler)) == {1: 1}

    def test_a_waiting_sequence_can_be_aborted(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        for sequence_id in range(3):
            add(scheduler, sequence_id, 5, max_tokens=1)
        step(scheduler)
        assert scheduler.abort(1) == StepOutput(1, finish_reason="abort")
        assert [o.sequence_id for o in step(scheduler)] == [2]
        assert not scheduler.has_work

    def test_abort_all_ends_everyone_and_forgets_the_cache(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True, max_num_seqs=1)
        add(scheduler, 0, 9)
        add(scheduler, 1, 9)
        schedule(scheduler)
        outputs = scheduler.abort_all("out of memory")
        assert [(o.sequence_id, o.finish_reason, o.error_message) for o in outputs] == [
            (0, "error", "out of memory"),
            (1, "error", "out of memory"),
        ]
        assert not scheduler.has_work
        assert scheduler.block_pool.num_free == 64
        assert scheduler.block_pool.num_cached == 0
        add(scheduler, 0, 9, max_tokens=1)
        assert step(scheduler)[0].num_cached_tokens == 0

    def test_logprobs_pass_through(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 5)
        add(scheduler, 1, 5, logprobs=0)
        logprobs = TokenLogprobs(-0.5)
        outputs = scheduler.commit(schedule(scheduler), SampledTokens((3, 4), (None, logprobs)))
        assert [output.logprobs for output in outputs] == [(), (logprobs,)]


class TestPrefixSharing:
    def test_the_first_output_reports_what_the_cache_served(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        add(scheduler, 0, range(10), max_tokens=1)
        assert step(scheduler)[0].num_cached_tokens == 0
        add(scheduler, 1, [*range(9), 99], max_tokens=2)
        batch = schedule(scheduler)
        assert [(s.start, s.num_tokens) for s in batch.sequences] == [(8, 2)]
        assert commit(scheduler, batch)[0].num_cached_tokens == 8
        assert step(scheduler)[0].num_cached_tokens == 0

    def test_outputs_are_found_by_the_next_turn_of_a_conversation(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        add(scheduler, 0, range(6), max_tokens=7)
        while scheduler.has_work:
            step(scheduler)
        add(scheduler, 1, [*range(6), *[TOKEN] * 7, 1, 2], max_tokens=1)
        assert step(scheduler)[0].num_cached_tokens == 12

    def test_equal_prompts_that_arrive_together_are_computed_once(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        for sequence_id in range(4):
            add(scheduler, sequence_id, range(30))
        batch = schedule(scheduler)
        assert sorted(shares(batch).values()) == [2, 2, 2, 30]
        assert all(s.samples for s in batch.sequences)

    def test_a_row_that_starts_and_skips_ahead_in_one_step_hears_of_its_whole_table(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        add(scheduler, 0, range(9), max_tokens=1)
        step(scheduler)
        add(scheduler, 1, range(30))
        add(scheduler, 2, range(30))
        batch = schedule(scheduler)
        assert {s.sequence_id: s.start for s in batch.sequences} == {1: 28, 2: 8}
        assert [(update.first_index, len(update.block_ids)) for update in batch.block_updates] == [(0, 8), (0, 8)]

    def test_equal_long_prompts_share_the_work_over_several_steps(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        for sequence_id in range(4):
            add(scheduler, sequence_id, range(200), max_tokens=1)
        num_tokens = 0
        while scheduler.has_work:
            batch = schedule(scheduler)
            num_tokens += batch.num_tokens
            commit(scheduler, batch)
        assert num_tokens == 200 + 3 * 4
        assert scheduler.block_pool.num_free == 64

    def test_a_prefix_cannot_be_served_twice_over(self) -> None:
        """Admission counts cached blocks that are free: taking them uses up the free list."""
        scheduler = make_scheduler(enable_prefix_caching=True, num_blocks=8, max_model_len=32)
        add(scheduler, 0, range(25), max_tokens=1)
        step(scheduler)
        add(scheduler, 1, 5)
        add(scheduler, 2, range(25))
        schedule(scheduler)
        assert [s.sequence_id for s in scheduler._waiting] == [2]

    def test_a_preempted_prefill_reports_only_what_its_last_start_was_served(self) -> None:
        scheduler = make_scheduler(
            enable_prefix_caching=True, num_blocks=16, max_model_len=64, max_num_batched_tokens=3
        )
        add(scheduler, 0, range(40, 80), max_tokens=1)
        while scheduler.has_work:
            step(scheduler)
        add(scheduler, 1, 7, max_tokens=40)
        while not step(scheduler):
            pass
        add(scheduler, 2, [*range(40, 48), *range(40)], max_tokens=1)
        num_computed, num_starts, outputs = 0, 0, {}
        while scheduler.has_work:
            batch = schedule(scheduler)
            if batch.row_starts:
                num_computed, num_starts = 0, num_starts + 1
            num_computed += shares(batch).get(2, 0)
            outputs.update({output.sequence_id: output for output in commit(scheduler, batch)})
        assert num_starts == 2
        assert outputs[2].num_cached_tokens == 48 - num_computed > 8


class TestStats:
    def test_counts_and_gauges(self) -> None:
        scheduler = make_scheduler(enable_prefix_caching=True)
        add(scheduler, 0, range(9), max_tokens=3)
        step(scheduler)
        add(scheduler, 1, range(9), max_tokens=1)
        step(scheduler)
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (1, 0, 64)
        assert stats.num_free_blocks == 64 - 3
        assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (18, 3, 2)
        assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (18, 8)
        scheduler.reset_stats()
        assert (scheduler.stats().steps_total, scheduler.stats().num_running) == (0, 1)

    def test_a_disabled_cache_is_never_queried(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, 0, 9)
        step(scheduler)
        assert scheduler.stats().prefix_query_tokens_total == 0
