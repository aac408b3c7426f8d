"""The platforms that start a container, each recognised by its variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from serve_app.cli import azureml, hf_endpoints, kserve, sagemaker, vertex


class Platform(Protocol):
    """A platform's contract; its modules implement it by their functions.

    ``overrides`` returns the keys of TorchServe that it sets, each with its value and origin, and
    ``settings`` the settings without such a key, by section. ``text`` is the config.properties, which takes
    precedence for keys that the platform does not require. Both raise StartError.
    """

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802  (a constant of the modules)
        """Prefixes of its variables."""

    def is_present(self, environment: Mapping[str, str]) -> bool: ...

    def describe(self, environment: Mapping[str, str]) -> str:
        """Return the platform's name, and what it serves."""

    def overrides(
        self, environment: Mapping[str, str], text: str, where: str
    ) -> dict[str, tuple[str, str]]: ...

    def settings(self, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]: ...

    def paths(self, environment: Mapping[str, str]) -> tuple[str, str]:
        """Return the paths of the health probe and of predictions."""


PLATFORMS: tuple[Platform, ...] = (vertex, kserve, sagemaker)  # the first one that is present applies
# Their variables are set as well where the container's command is another one, which names its own models.
OF_SERVE: tuple[Platform, ...] = (azureml, hf_endpoints)
# Variables with which the image's default command is `serve`; cluster/entrypoint.sh has them, too.
SERVED_BY_DEFAULT = (
    *(vertex.PORT, azureml.ENTRY_SCRIPT, azureml.MODEL_DIR),
    *(hf_endpoints.MODEL_DIR, hf_endpoints.MODEL_ID),
)


def recognise(environment: Mapping[str, str], container: bool = False) -> Platform | None:
    """Return the platform of these variables; None outside of all.

    With ``container`` the image's argument ``serve`` is served.
    """
    candidates = (*PLATFORMS, *(OF_SERVE if container else ()))
    return next((platform for platform in candidates if platform.is_present(environment)), None)
