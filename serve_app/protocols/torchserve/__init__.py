"""TorchServe's REST APIs, to the byte where a client can see it; docs/compatibility.md has differences."""
