"""Every few seconds, one log line per busy model: throughput, queue, KV use, prefix hits.

Runs as a task of the daemon; reads the supervisor's residents and nothing else.
"""

from __future__ import annotations

import asyncio
import logging

from app.metrics import kv_usage
from app.residency.supervisor import Supervisor
from engine.api.wire import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


def throughput_line(model: str, previous: EngineStats, current: EngineStats, interval_s: float) -> str | None:
    """The line for what a worker did within `interval_s`; None if it was idle."""
    num_prompt = current.prompt_tokens_total - previous.prompt_tokens_total
    num_generated = current.generation_tokens_total - previous.generation_tokens_total
    if not (num_prompt or num_generated or current.num_running or current.num_waiting):
        return None
    num_queries = current.prefix_query_tokens_total - previous.prefix_query_tokens_total
    num_hits = current.prefix_hit_tokens_total - previous.prefix_hit_tokens_total
    return (
        f"{model}: prompt throughput {num_prompt / interval_s:.1f} tokens/s, "
        f"generation throughput {num_generated / interval_s:.1f} tokens/s, "
        f"running {current.num_running}, waiting {current.num_waiting}, "
        f"KV cache usage {100 * kv_usage(current):.1f} %, "
        f"prefix cache hit rate {100 * num_hits / num_queries if num_queries else 0.0:.1f} %"
    )


async def log_throughput(supervisor: Supervisor, interval_s: float = INTERVAL_S) -> None:
    """Log until cancelled."""
    seen: dict[tuple[str, int | None], EngineStats] = {}
    while True:
        await asyncio.sleep(interval_s)
        current = {(one.name, one.worker.pid): one.worker.stats for one in supervisor.residents}
        for key, stats in current.items():
            line = throughput_line(key[0], seen.get(key, EngineStats()), stats, interval_s)
            if line is not None:
                logger.info("%s", line)
        seen = current
