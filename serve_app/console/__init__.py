"""The web console: pages over a server's public APIs, in a process of their own."""
