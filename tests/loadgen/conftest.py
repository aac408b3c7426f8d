"""The faulty HTTP server as a fixture."""

from faulty_server import server

__all__ = ["server"]
