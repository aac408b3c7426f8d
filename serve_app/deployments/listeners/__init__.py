"""The servers on the ports: HTTP, gRPC, management, and the console's process."""
