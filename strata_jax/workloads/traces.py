"""Trace files by format."""

import pathlib
from collections.abc import Callable, Iterator

from strata_jax.workloads import (
  loogle_documents,
  traces_azure,
  traces_claude_code,
  traces_mooncake,
)
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload


def _loogle(path: pathlib.Path | str, limit: int | None) -> Workload:
  workload = loogle_documents.workload(loogle_documents.read_documents(path))
  return workload.with_requests(workload.requests[:limit])


LOADERS: dict[str, Callable[[pathlib.Path | str, int | None], Workload]] = {
  "mooncake": traces_mooncake.load,
  "claude_code": traces_claude_code.load,
  "azure2023": traces_azure.load,
  "loogle": _loogle,
}


def load(trace_format: str, path: pathlib.Path | str, limit: int | None = None) -> Workload:
  """The first `limit` requests of a trace file (or folder) of one of the formats of `LOADERS`."""
  if trace_format not in LOADERS:
    expected = ", ".join(LOADERS)
    raise ValueError(f"trace_format: expected one of {expected}, got {trace_format!r}")
  return LOADERS[trace_format](path, limit)


def stream(
  trace_format: str, path: pathlib.Path | str, limit: int | None = None
) -> Iterator[Request]:
  """The same requests one at a time: a Mooncake prompt is expanded only when it is asked for."""
  if trace_format == "mooncake":
    return traces_mooncake.requests(traces_mooncake.read_rows(path, limit))
  return iter(load(trace_format, path, limit).requests)
