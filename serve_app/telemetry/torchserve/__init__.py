"""TorchServe's metrics, with its names, in its text format and in its log files."""

from __future__ import annotations

from serve_app.settings import MIB, Settings
from serve_app.telemetry.log_writer import AsyncWriter, FileSink
from serve_app.telemetry.torchserve import catalog
from serve_app.telemetry.torchserve.recorders import MetricsLog, TorchServeRecorders

SERVER_LOG = "ts_metrics.log"
MODEL_LOG = "model_metrics.log"
_MAX_SIZE = 100 * MIB  # of a log file, which is then renamed, as by TorchServe


def load_catalog(settings: Settings) -> catalog.MetricCatalog:
    """Return the metrics that ``telemetry.metrics_config`` declares, or the default ones.

    Raises ConfigurationError.
    """
    file = settings.telemetry.metrics_config
    return catalog.load(settings.root / file) if file else catalog.DEFAULT


def create_recorders(settings: Settings) -> TorchServeRecorders:
    """Return the recorders of a process for the settings ``telemetry``. Raises ConfigurationError."""
    telemetry = settings.telemetry
    metric_catalog = load_catalog(settings)
    if telemetry.metrics_mode == "prometheus":
        return TorchServeRecorders(metric_catalog, "prometheus", telemetry.model_metrics_auto_detect)
    folder = settings.metrics_dir
    server, model = (
        MetricsLog(AsyncWriter(FileSink(folder / name, _MAX_SIZE, settings.log_file_mode), name))
        for name in (SERVER_LOG, MODEL_LOG)
    )
    return TorchServeRecorders(
        metric_catalog, telemetry.metrics_mode, telemetry.model_metrics_auto_detect, server, model
    )
