"""The gRPC messages, and the code that ``python -m serve_app.proto.generate`` generates from them."""
