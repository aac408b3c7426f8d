"""The transport between processes: Unix sockets on one host, Ray's handles between hosts."""
