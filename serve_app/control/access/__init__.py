"""Keys that are created through the API, and the public keys of token issuers."""
