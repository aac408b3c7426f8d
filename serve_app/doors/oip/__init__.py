"""The Open Inference Protocol, version 2. README.md has what is answered, and every decision."""
