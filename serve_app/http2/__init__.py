"""A gRPC server on asyncio: HTTP/2 connections, streams and calls; ``server.py`` is the entry point."""
