"""The resources of a host: cores, threads and memory of a replica."""
