"""The messages of gRPC, and the code that ``python -m serve_app.proto.generate`` makes of them."""
