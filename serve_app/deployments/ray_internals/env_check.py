"""Check of the environment variables that configs/serve.env sets for Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping

_CONSEQUENCES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "every request passes one Python proxy, at about a tenth of the throughput",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "each answer costs more of Ray's work",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "set-default loses requests under way, and each request costs more"
    ),
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": (
        "4,096 slow clients close the port, and a crash of HAProxy costs 5 s"
    ),
}


def missing_settings_warning(environ: Mapping[str, str]) -> str:
    """Return a warning about missing variables; empty where none is missing."""
    missing = [name for name in _CONSEQUENCES if environ.get(name, "0") in ("", "0")]
    if not missing:
        return ""
    lines = [f"  {name} is not set: {_CONSEQUENCES[name]}" for name in missing]
    return "\n".join(
        [
            "This server runs without all of configs/serve.env. It answers, and this is what it loses:",
            *lines,
            "Stop Ray, read the file into the environment (`set -a; . configs/serve.env; set +a`) "
            "and start again;",
            "`torchrelay start` does so by itself.",
        ]
    )
