"""TorchServe's metrics, by its names, in its text form and in its log files, beside our own."""

from __future__ import annotations

from serve_app.settings import MIB, Settings
from serve_app.telemetry.sink import Drain, File
from serve_app.telemetry.torchserve import catalogue
from serve_app.telemetry.torchserve.meters import Lines, TorchServeMeters

SERVER_LOG = "ts_metrics.log"
MODEL_LOG = "model_metrics.log"
_FULL = 100 * MIB  # of a log file; then it is put aside as TorchServe's would be


def catalogue_of(settings: Settings) -> catalogue.Catalogue:
    """What ``telemetry.metrics_config`` declares, or the default. Raises ConfigurationError."""
    file = settings.telemetry.metrics_config
    return catalogue.read(settings.root / file) if file else catalogue.DEFAULT


def meters_of(settings: Settings) -> TorchServeMeters:
    """A process's meters as ``telemetry`` in the settings asks for them. Raises ConfigurationError."""
    said = settings.telemetry
    known = catalogue_of(settings)
    if said.metrics_mode == "prometheus":
        return TorchServeMeters(known, "prometheus", said.model_metrics_auto_detect)
    folder = settings.metrics_dir
    server, model = (Lines(Drain(File(folder / name, _FULL), name)) for name in (SERVER_LOG, MODEL_LOG))
    return TorchServeMeters(known, said.metrics_mode, said.model_metrics_auto_detect, server, model)
