"""The commands of ``torchrelay``, one module for each; serve_app/cli/app.py registers them."""
