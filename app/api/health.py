"""/health, /version and /metrics."""

from __future__ import annotations

from litestar import Response, get
from prometheus_client import CONTENT_TYPE_LATEST

from app.metrics import Metrics
from app.residency.supervisor import Supervisor
from app.schema.admin import Health, HealthModel, Version
from app.version import VERSION


@get("/health", tags=["Daemon"])
async def health(supervisor: Supervisor) -> Health:
    """Whether the daemon takes requests, and the state of each model in memory."""
    return Health(models=tuple(HealthModel(name, state.state) for state in supervisor.states() for name in state.names))


@get("/version", tags=["Daemon"])
async def version() -> Version:
    return Version(VERSION)


@get("/metrics", tags=["Daemon"], media_type="text/plain")
async def metrics(supervisor: Supervisor, instruments: Metrics) -> Response[bytes]:
    """Counters, gauges and histograms in the Prometheus text format."""
    supervisor.observe_stats()
    return Response(instruments.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


daemon_routes = [health, version, metrics]
