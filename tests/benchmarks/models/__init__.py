"""Sources that are packed into the benchmark's archives; each file stands alone there."""
