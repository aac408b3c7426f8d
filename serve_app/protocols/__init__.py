"""Translation between wire formats and the data or control plane, with a package for each protocol.

``http_app.py`` and ``grpc_app.py`` assemble them for each port.
"""
