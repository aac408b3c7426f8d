"""The control plane: the desired state, its changes, and the reconciler that applies it to Ray Serve.

``api.py`` has the operations that protocols call, ``registry.py`` the desired state. A feature is a package.
"""
