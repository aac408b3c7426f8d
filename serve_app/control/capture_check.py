"""The check of a capture policy at registration: its destination, packages, and reference."""

from __future__ import annotations

import re

from handlers import extras
from serve_app.dataplane.capture.reference import read_reference
from serve_app.domain.capture import CapturePolicy
from serve_app.errors import ConfigurationError
from serve_app.model_store import object_stores
from serve_app.model_store.archive import Archive
from serve_app.settings import Settings


def check_capture(policy: CapturePolicy, archive: Archive, settings: Settings) -> None:
    """Check everything that ``capture`` in an archive's configuration names.

    Raises ConfigurationError, and InvalidArchive where the reference file is missing.
    """
    where = archive.config_place
    if policy.format == "parquet" and not extras.is_installed("pyarrow"):
        cure = f"{extras.install_command('pyarrow')}, or write format: jsonl"
        raise ConfigurationError(
            where, f"capture: format is 'parquet', which needs pyarrow, and it is not installed; {cure}"
        )
    if policy.destination:
        _check_destination(policy.destination, where, settings)
    if policy.reference_version == archive.manifest.version:
        raise ConfigurationError(
            where,
            f"capture: reference_version is {policy.reference_version!r}, which is this version itself; "
            "name another one, or leave it out",
        )
    if isinstance(policy.reference, str):
        read_reference(archive.find(policy.reference), policy, f"{archive.name}/{policy.reference}")


def is_allowed(destination: str, settings: Settings) -> bool:
    """Return whether the settings allow a destination."""
    return any(re.fullmatch(pattern, destination) for pattern in settings.telemetry.capture_destinations)


def _check_destination(destination: str, where: str, settings: Settings) -> None:
    if not is_allowed(destination, settings):
        raise ConfigurationError(
            where,
            f"capture: destination is {destination!r}, which no pattern of telemetry.capture_destinations "
            "in the server's settings matches; add one there, or leave the destination out",
        )
    scheme, separator, _ = destination.partition("://")
    if separator and not object_stores.is_installed(scheme):
        extra = object_stores.EXTRAS[scheme]
        raise ConfigurationError(
            where,
            f"capture: destination is {destination!r}, and {scheme}:// needs a package that is not "
            f"installed; pip install torchrelay[{extra}]",
        )
