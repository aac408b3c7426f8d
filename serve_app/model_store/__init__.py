"""From a URL to a model's directory: fetched, unpacked safely, read, and kept under its digest."""
