"""The data plane of one process, with the replicas of the whole cluster behind it."""

from __future__ import annotations

from serve_app.dataplane.data_plane import DataPlane, DataPlaneLimits, RoutingTableReader
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.deployments.management_client import ReportQueue
from serve_app.deployments.prefix_router import PrefixRouter
from serve_app.deployments.replica_client import ReplicaClients
from serve_app.deployments.sequence_router import LocalReplica, SequenceRouter, sequence_headers
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters


def create_data_plane(
    reader: RoutingTableReader,
    meters: Meters,
    settings: Settings,
    reports: ReportQueue,
    local: LocalReplica | None = None,
) -> tuple[DataPlane, ShadowMirror]:
    """Create the data plane of this process and its mirror, and add their reports to ``reports``.

    ``local`` is this process's own replica, if it has one.
    """
    clients = ReplicaClients(reader, settings)
    mirror = ShadowMirror(lambda: reader.table, clients, meters)
    plane = DataPlane(
        reader,
        meters,
        PrefixRouter(reader, clients),
        None if local is None else (local.ref, local.backend),
        wake=clients.wake,
        mirror=mirror,
        sequence_affinity=SequenceRouter(reader, clients, sequence_headers(settings), local),
        limits=DataPlaneLimits(
            max_workflow_items=settings.inference.max_workflow_items, gateways=settings.inference.gateways
        ),
    )
    reports.sources.update(trials=plane.experiment_collector.drain, shadow=mirror.drain)
    plane.experiment_collector.journal = reports.journal
    return plane, mirror
