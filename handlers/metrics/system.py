"""Measurements of the machine, each as a Metric of level Host."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import psutil

from handlers.metrics.metric import Dimension, Metric

_HOST = Dimension("Level", "Host")
_MB, _GB = 1 << 20, 1 << 30
# Of control groups, second and first version: the limit, the bytes in use, and what is cache among them.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
_QUERY = "index,utilization.gpu,memory.used,memory.total"


def cpu_utilization() -> Metric:
    """Return the utilization of all cores since the last call in this process; the first call returns 0."""
    return _metric("CPUUtilization", psutil.cpu_percent(), "percent")


def memory_used() -> Metric:
    return _metric("MemoryUsed", measure_memory()[0] / _MB, "MB")


def memory_available() -> Metric:
    return _metric("MemoryAvailable", measure_memory()[1] / _MB, "MB")


def memory_utilization() -> Metric:
    _, available, total = measure_memory()
    return _metric("MemoryUtilization", round(100 * (total - available) / total, 1), "percent")


def measure_memory(groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int, int]:
    """Return the used, available and total bytes of the machine, or of this container where it has a limit.

    As in `docker stats`, the inactive part of the file cache does not count as used.
    """
    memory = psutil.virtual_memory()
    for limit_file, used_file, stat_file, inactive in _MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit = int((groups / limit_file).read_text())
            if limit >= memory.total:
                break
            statistics = dict(line.split() for line in (groups / stat_file).read_text().splitlines())
            used = max(0, int((groups / used_file).read_text()) - int(statistics[inactive]))
            return used, max(0, min(limit - used, memory.available)), limit
    return memory.used, memory.available, memory.total


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
