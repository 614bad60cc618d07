"""GET /api/usage: how long the prompts and answers of each model have been."""

from __future__ import annotations

from litestar import get

from app.schema.chats import UsageReport
from app.translate.chats import usage_entry
from app.usage_recorder import UsageRecorder
from store.database import DatabaseThread
from store.usage_db import UsageDb


@get("/api/usage", tags=["Models"])
async def get_usage(database: DatabaseThread, usage: UsageRecorder) -> UsageReport:
    """Lengths of requests by model, and what `max_model_len` they need."""
    await usage.flush()
    models = await database.run(lambda connection: UsageDb(connection).models())
    return UsageReport(tuple(map(usage_entry, models)))
