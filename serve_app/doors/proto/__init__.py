"""The messages of the gRPC doors, and the code that ``python -m serve_app.doors.proto.generate`` makes of them."""
