"""TorchServe's REST APIs, to the byte where a client can see it. README.md has its every quirk."""
