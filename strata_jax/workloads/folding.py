"""Synthetic requests for a real model: token ids within its vocabulary, its own outputs."""

import dataclasses

import numpy as np

from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload, output_tokens

_NO_CONTEXT = (np.empty(0, np.int32), np.empty(0, np.int32))


def fold_ids(ids: np.ndarray, vocab_size: int, stream: int = 0) -> np.ndarray:
  """Maps ids to a vocabulary by a fixed hash, int32 of the same shape.

  Equal ids stay equal, so prefixes stay shared. Different ids may meet (the vocabulary is smaller),
  runs of them practically never do.

  Args:
    ids: int [...], >= 0.
    vocab_size: of the model.
    stream: another number gives other tokens for the same ids.

  Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
  """
  mixed = _mix(ids.astype(np.uint64) + _mix(np.uint64(stream) + np.zeros_like(ids, np.uint64)))
  return (mixed % np.uint64(vocab_size)).astype(np.int32)


def fold(workload: Workload, vocab_size: int, *, tail_stream: int = 0) -> Workload:
  """The workload for a model: folded ids, and as many output tokens as were forced.

  Args:
    workload: with ids of any size, as the generators of `synthetic` make them.
    vocab_size: of the model.
    tail_stream: what follows a shared context takes its tokens from this stream of `fold_ids`:
      with another number the contexts are the same and everything else is new.
  """
  folded = tuple(fold_ids(context, vocab_size) for context in workload.contexts)
  by_first = {
    int(context[0]): (context, ids)
    for context, ids in zip(workload.contexts, folded, strict=True)
    if len(context)
  }
  requests = []
  for request in workload.requests:
    prompt = request.prompt_ids
    context, shared = by_first.get(int(prompt[0]) if len(prompt) else -1, _NO_CONTEXT)
    if not np.array_equal(prompt[: len(context)], context):
      context, shared = _NO_CONTEXT
    tail = fold_ids(prompt[len(context) :], vocab_size, tail_stream)
    requests.append(_own_outputs(request, np.concatenate([shared, tail])))
  return dataclasses.replace(workload, requests=tuple(requests), contexts=folded)


def _own_outputs(request: Request, prompt_ids: np.ndarray) -> Request:
  return dataclasses.replace(
    request, prompt_ids=prompt_ids, max_new_tokens=output_tokens(request), forced_output_ids=None,
    stop_token_ids=(),
  )  # fmt: skip


def _mix(x: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore"):
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
