"""The ports of a server, and whether a process can bind them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from serve_app.settings import Settings


def list_ports(
    http: tuple[str, int], settings: Settings, name_setting: Callable[[str], str] = str
) -> dict[int, tuple[str, str]]:
    """Return the host and the setting of each port that the server binds.

    ``name_setting`` returns a setting's name for operators.
    """
    m, g = settings.management, settings.grpc
    ports = {
        http[1]: (http[0], name_setting("http_options.port")),
        m.port: (m.host, name_setting("management.port")),
        m.metrics_port: (m.metrics_host, name_setting("management.metrics_port")),
        g.port: (g.host, name_setting("grpc.port")),
        g.management_port: (g.management_host, name_setting("grpc.management_port")),
    }
    ports.pop(0, None)  # no listener
    return ports


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error of a process that binds the port; None where it is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except OverflowError:
            return OSError(errno.EINVAL, "a port is at most 65535")
    return None
