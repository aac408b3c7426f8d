"""An S3 server in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import boto3
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def running_s3(bucket: str, port: int = 0) -> Iterator[Any]:
    """Run an S3 server with an empty bucket; yield a client, whose ``meta.endpoint_url`` is the address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    try:
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        with contextlib.closing(boto3.client("s3", "us-east-1", endpoint_url=address, **keys)) as client:
            client.create_bucket(Bucket=bucket)
            try:
                yield client
            finally:  # the servers of one process share their buckets, also with those of later tests
                for found in client.list_objects_v2(Bucket=bucket).get("Contents", ()):
                    client.delete_object(Bucket=bucket, Key=found["Key"])
    finally:
        server.stop()
