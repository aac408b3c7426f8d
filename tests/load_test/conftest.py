"""The faulty HTTP server as a fixture."""

from tests.support.faulty_server import server

__all__ = ["server"]
