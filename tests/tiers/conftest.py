"""A local object store that speaks S3, for one test session."""

import itertools
import json
import logging
import urllib.request
from collections.abc import Iterator

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
  """The address of a server on this machine, with credentials in the environment."""
  moto_server = pytest.importorskip("moto.server", reason="needs moto (extra `dev`)")
  logging.getLogger("werkzeug").setLevel(logging.ERROR)
  server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_bucket(s3_endpoint) -> str:
  """A fresh bucket: the JSON that opens it as a store."""
  endpoint, name = s3_endpoint, f"bucket{next(_numbers)}"
  urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
  return json.dumps(
    {"driver": "s3", "bucket": name, "path": "kv", "endpoint": endpoint, "aws_region": "us-east-1"}
  )
