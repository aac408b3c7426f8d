"""Sockets, TLS, private files, and outgoing requests."""
