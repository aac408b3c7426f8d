"""The application of `serve run`, app.yaml, for commands that start no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.terminal import fail
from serve_app.cli.torchserve_flags import default_config
from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, load

CONFIG = Path("configs/app.yaml")


def read_config(file: Path | None) -> tuple[tuple[str, int], Settings]:
    """Return the inference address and the settings of an app.yaml; exit where it is invalid.

    Without a file they are those of configs/app.yaml, or of the installed app.yaml where there is none.
    """
    file = file or (CONFIG if CONFIG.is_file() else default_config(CONFIG.name))
    try:
        document: Any = yaml.safe_load(file.read_text())
        http = document.get("http_options") or {}
        address = (str(http.get("host", "127.0.0.1")), int(http.get("port", 8000)))
        return address, load(document["applications"][0].get("args"), str(file))
    except OSError as error:
        fail(f"{file}: {error.strerror}; pass an app.yaml")
    except ConfigurationError as error:
        fail(str(error))
    except (yaml.YAMLError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        fail(f"{file}: not a configuration of `serve run`, with http_options and applications")
