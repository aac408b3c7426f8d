"""The Ray Serve classes: what runs where, and Ray's only home beside the reconciler."""
