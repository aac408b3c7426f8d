"""The data plane of one process, with the replicas of the whole cluster behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.dataplane.data_plane import DataPlane, DataPlaneLimits, RoutingTableReader
from serve_app.dataplane.routing.prefix_router import PrefixRouter
from serve_app.dataplane.routing.sequence_router import LocalReplica, SequenceRouter, sequence_headers
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.deployments.management_client import ReportQueue
from serve_app.deployments.ray_internals.replica_channels import break_off_lost_connections
from serve_app.deployments.transport.pool_client import LocalHost, VersionClients
from serve_app.runtime.backends import Backend
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters


@dataclass(frozen=True)
class PoolHostBackends:
    """The host of this process, and its loaded versions by name and version; the mapping changes."""

    local: LocalHost
    loaded: Mapping[tuple[str, str], Backend]


def create_data_plane(
    reader: RoutingTableReader,
    meters: Meters,
    settings: Settings,
    reports: ReportQueue,
    local: LocalReplica | None = None,
    host: PoolHostBackends | None = None,
    stores_responses: bool = True,
) -> tuple[DataPlane, ShadowMirror]:
    """Create the data plane of this process and its mirror, and add their reports to ``reports``.

    ``local`` is this process's own replica, if it has one; ``host`` has the versions of a pool's host.
    """
    break_off_lost_connections()
    clients = VersionClients(reader, settings, None if host is None else host.local)
    backends: Mapping[tuple[str, str], Backend] = {} if host is None else host.loaded
    if local is not None:
        backends = {(local.ref.name, local.ref.version): local.backend}
    mirror = ShadowMirror(lambda: reader.table, clients, meters)
    plane = DataPlane(
        reader,
        meters,
        PrefixRouter(reader, clients),
        backends,
        wake=clients.wake,
        mirror=mirror,
        sequence_affinity=SequenceRouter(reader, clients, sequence_headers(settings), local),
        limits=DataPlaneLimits(
            max_workflow_items=settings.inference.max_workflow_items,
            gateways=settings.inference.gateways,
            max_cache_bytes=settings.inference.max_cache_bytes if stores_responses else 0,
        ),
    )
    reports.sources.update(trials=plane.experiment_collector.drain, shadow=mirror.drain)
    plane.experiment_collector.journal = reports.journal
    return plane, mirror
