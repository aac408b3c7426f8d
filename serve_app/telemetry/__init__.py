"""What the server says of itself: metrics, logs, traces."""
