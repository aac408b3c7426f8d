"""The processes that run models: replicas, hosts of pools, and ranks of sharded models."""
