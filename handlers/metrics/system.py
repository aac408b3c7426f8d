"""Measurements of the machine, each as a Metric of level Host."""

from __future__ import annotations

import shutil
import subprocess

import psutil

from handlers.metrics.metric import Dimension, Metric

_HOST = Dimension("Level", "Host")
_MB, _GB = 1 << 20, 1 << 30
_QUERY = "index,utilization.gpu,memory.used,memory.total"


def cpu_utilization() -> Metric:
    """Return the utilization of all cores since the last call in this process; the first call returns 0."""
    return _metric("CPUUtilization", psutil.cpu_percent(), "percent")


def memory_used() -> Metric:
    return _metric("MemoryUsed", psutil.virtual_memory().used / _MB, "MB")


def memory_available() -> Metric:
    return _metric("MemoryAvailable", psutil.virtual_memory().available / _MB, "MB")


def memory_utilization() -> Metric:
    return _metric("MemoryUtilization", psutil.virtual_memory().percent, "percent")


def disk_used() -> Metric:
    """Return the used space of the root file system."""
    return _metric("DiskUsage", psutil.disk_usage("/").used / _GB, "GB")


def disk_utilization() -> Metric:
    return _metric("DiskUtilization", psutil.disk_usage("/").percent, "percent")


def disk_available() -> Metric:
    return _metric("DiskAvailable", psutil.disk_usage("/").free / _GB, "GB")


def gpu_utilization(num_of_gpu: int = 1) -> list[Metric]:
    """Return three metrics for each GPU, read from nvidia-smi; none where it does not exist or fails."""
    program = shutil.which("nvidia-smi")
    if program is None or num_of_gpu <= 0:
        return []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpu_metrics(output)


def parse_gpu_metrics(output: str) -> list[Metric]:
    """Return the metrics in nvidia-smi's lines ``index, utilization, MiB used, MiB total``, without
    "[N/A]".
    """
    metrics: list[Metric] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            continue
        device = Dimension("DeviceId", fields[0])
        utilization, used, total = map(_parse_number, fields[1:])
        if used is not None and total:
            metrics.append(_metric("GPUMemoryUtilization", 100 * used / total, "percent", device))
        if used is not None:
            metrics.append(_metric("GPUMemoryUsed", used, "MB", device))
        if utilization is not None:
            metrics.append(_metric("GPUUtilization", utilization, "percent", device))
    return metrics


def collect_metrics() -> list[Metric]:
    """Return all measurements."""
    return [
        cpu_utilization(),
        memory_used(),
        memory_available(),
        memory_utilization(),
        disk_used(),
        disk_utilization(),
        disk_available(),
        *gpu_utilization(),
    ]


def _metric(name: str, value: float, unit: str, *dimensions: Dimension) -> Metric:
    return Metric(name, value, unit, [_HOST, *dimensions])


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
