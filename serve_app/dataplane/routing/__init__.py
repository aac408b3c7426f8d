"""The choice of the version and of the replica that run a request."""
