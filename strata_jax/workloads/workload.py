"""A named list of requests, and what a loader wants to say about it."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from strata_jax.workloads.request import Request

MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Requests in the order of their arrival (or, without arrival times, of their submission).

  `contexts`: the shared documents, with which a run may warm its cache before it starts; empty
  when the workload has no such notion. `notes`: rules that a loader applied, with counts.
  """

  name: str
  requests: tuple[Request, ...]
  contexts: tuple[np.ndarray, ...] = ()  # each int32 [tokens]
  notes: Mapping[str, int | float | str] = MappingProxyType({})

  def __post_init__(self) -> None:
    ids = [request.request_id for request in self.requests]
    if len(set(ids)) != len(ids):
      raise ValueError(f"Workload {self.name}: expected distinct request ids")

  @property
  def input_tokens(self) -> int:
    return sum(len(request.prompt_ids) for request in self.requests)

  @property
  def output_tokens(self) -> int:
    return sum(output_tokens(request) for request in self.requests)

  def with_requests(self, requests: Iterable[Request]) -> "Workload":
    """The same workload with other requests."""
    return dataclasses.replace(self, requests=tuple(requests))


class TokenIds:
  """Hands out runs of token ids that are used nowhere else in a workload.

  Synthetic text needs equality and nothing else: equal ids where prompts share text, distinct ids
  everywhere else. No tokenizer is involved, and no id is bounded by a vocabulary.
  """

  def __init__(self, first: int = 0) -> None:
    self._next = first

  def take(self, tokens: int) -> np.ndarray:
    """The next `tokens` ids, int32 [tokens]. Raises OverflowError when int32 is used up."""
    end = self._next + tokens
    if end - 1 > MAX_TOKEN_ID:
      raise OverflowError(f"workload needs token ids beyond int32: {end}")
    ids = np.arange(self._next, end, dtype=np.int32)
    self._next = end
    return ids


def output_tokens(request: Request) -> int:
  """How many tokens the request generates when nothing stops it earlier."""
  if request.forced_output_ids is None:
    return request.max_new_tokens
  return len(request.forced_output_ids)
