"""The data plane, which runs one request whatever its protocol, in replicas and gateways.

``data_plane.py`` is the entry point: key, deadline, version, admission, backend and measurement.
"""
