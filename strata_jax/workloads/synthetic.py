"""Synthetic request lists with the published shapes of the workloads of the Strata paper.

Published: mean input and output tokens, contexts and queries of each workload. Not published, and
chosen here: the spread of the lengths (gamma, coefficient of variation below), equally many queries
a context, the length of a question. Every generator is a pure function of its arguments.
"""

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import TokenIds, Workload

ORDERS = ("adjacent", "shuffled", "spread")

_CONTEXT_VARIATION = 0.3
_QUESTION_VARIATION = 0.4
_OUTPUT_VARIATION = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DocumentShape:
  """Questions about shared documents."""

  name: str
  contexts: int
  queries: int
  mean_input_tokens: float
  mean_output_tokens: float
  mean_question_tokens: float


# Input, output, contexts and queries: Strata, section on workloads. Questions: the means of the
# LooGLE questions are 13 to 23 tokens with public tokenizers; NarrativeQA's are of the same kind.
LOOGLE = DocumentShape(
  name="loogle_like", contexts=105, queries=2410, mean_input_tokens=21613, mean_output_tokens=15.6,
  mean_question_tokens=20,
)  # fmt: skip
NARRATIVEQA = DocumentShape(
  name="narrativeqa_like", contexts=50, queries=1461, mean_input_tokens=54797,
  mean_output_tokens=13.0, mean_question_tokens=20,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversationShape:
  """Multi-turn conversations: a turn's prompt repeats everything said before."""

  name: str
  conversations: int
  requests: int
  mean_input_tokens: float  # over all turns
  mean_output_tokens: float
  mean_turn_tokens: float  # what the client adds each turn, the opening context apart
  think_s: float  # between the end of an answer and the next turn
  shared_context: bool  # whether the opening context is a document that can be warm


# The paper states 60 s of think time for ShareGPT; that of ReviewMT (10 s) is chosen here.
REVIEWMT = ConversationShape(
  name="reviewmt_like", conversations=100, requests=1092, mean_input_tokens=17708,
  mean_output_tokens=208.3, mean_turn_tokens=150, think_s=10.0, shared_context=True,
)  # fmt: skip
SHAREGPT = ConversationShape(
  name="sharegpt_like", conversations=600, requests=2000, mean_input_tokens=681,
  mean_output_tokens=261, mean_turn_tokens=90, think_s=60.0, shared_context=False,
)  # fmt: skip


def documents(shape: DocumentShape, *, order: str = "shuffled", seed: int = 0) -> Workload:
  """Questions about documents, in one of three orders.

  adjacent: all questions about a document in a row; shuffled: a random permutation; spread: round
  robin over the documents, so that equal documents are as far apart as can be.
  """
  if order not in ORDERS:
    raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
  rng = _rng(shape.name, seed)
  owner = np.arange(shape.queries) % shape.contexts  # [queries]
  question_tokens = lengths(rng, shape.queries, shape.mean_question_tokens, _QUESTION_VARIATION)
  output_tokens = lengths(rng, shape.queries, shape.mean_output_tokens, _OUTPUT_VARIATION)
  context_tokens = lengths(
    rng, shape.contexts, shape.mean_input_tokens - shape.mean_question_tokens, _CONTEXT_VARIATION,
    minimum=64,
  )  # fmt: skip
  ids = TokenIds()
  contexts = tuple(ids.take(int(tokens)) for tokens in context_tokens)
  if order == "adjacent":
    queries = np.argsort(owner, kind="stable")
  elif order == "spread":
    queries = np.arange(shape.queries)
  else:
    queries = rng.permutation(shape.queries)
  requests = tuple(
    Request(
      request_id=request_id,
      prompt_ids=np.concatenate([contexts[owner[query]], ids.take(int(question_tokens[query]))]),
      max_new_tokens=int(output_tokens[query]),
      forced_output_ids=ids.take(int(output_tokens[query])),
    )
    for request_id, query in enumerate(queries)
  )
  return Workload(name=f"{shape.name}_{order}", requests=requests, contexts=contexts)


def conversations(shape: ConversationShape, *, seed: int = 0) -> Workload:
  """Multi-turn conversations; turn k + 1 arrives `think_s` after turn k is over.

  The order of the list is round by round: all first turns, then all second turns.
  """
  rng = _rng(shape.name, seed)
  turns = _turns(rng, shape)
  count = int(turns.sum())
  turn_tokens = lengths(rng, count, shape.mean_turn_tokens, _QUESTION_VARIATION)
  output_tokens = lengths(rng, count, shape.mean_output_tokens, _OUTPUT_VARIATION)
  starts = np.concatenate([[0], np.cumsum(turns)[:-1]])
  history = sum(
    int(np.cumsum(turn_tokens[start : start + n]).sum())
    + int(np.cumsum(output_tokens[start : start + n])[:-1].sum())
    for start, n in zip(starts, turns, strict=True)
  )
  # What is missing to the mean input stands at the start of every conversation.
  opening = (shape.mean_input_tokens * count - history) / count
  if opening < 1:
    raise ValueError(f"{shape.name}: turns and outputs alone exceed the mean input")
  opening_tokens = lengths(rng, shape.conversations, opening, _CONTEXT_VARIATION)
  ids = TokenIds()
  openings = tuple(ids.take(int(tokens)) for tokens in opening_tokens)
  requests: list[Request] = []
  said = list(openings)
  last: list[int | None] = [None] * shape.conversations
  for turn in range(int(turns.max())):
    for index in range(shape.conversations):
      if turn >= turns[index]:
        continue
      entry = starts[index] + turn
      prompt_ids = np.concatenate([said[index], ids.take(int(turn_tokens[entry]))])
      output_ids = ids.take(int(output_tokens[entry]))
      requests.append(
        Request(
          request_id=len(requests),
          prompt_ids=prompt_ids,
          max_new_tokens=len(output_ids),
          follows=last[index],
          think_s=0.0 if turn == 0 else shape.think_s,
          forced_output_ids=output_ids,
          tenant=f"conversation_{index}",
        )
      )
      last[index] = len(requests) - 1
      said[index] = np.concatenate([prompt_ids, output_ids])
  contexts = openings if shape.shared_context else ()
  return Workload(name=shape.name, requests=tuple(requests), contexts=contexts)


def toolagent(*, requests: int = 2000, rate_rps: float = 2.0, seed: int = 0) -> Workload:
  """Agents that call the model twice at once: 38 % of requests share >= 6k tokens with another
  request within 1 s; the others share nothing. Published: that share. Arrivals are its own.
  """
  rng = _rng("toolagent_like", seed)
  twins = round(requests * 0.38 / 2)
  groups = np.array([2] * twins + [1] * (requests - 2 * twins))
  rng.shuffle(groups)
  starts_s = np.cumsum(rng.exponential(groups.mean() / rate_rps, len(groups)))
  ids = TokenIds()
  drafts: list[tuple[float, np.ndarray, np.ndarray]] = []
  prefix_tokens = 6000 + lengths(rng, len(groups), 2500, 1.0)
  tail_tokens = lengths(rng, requests, 250, 0.8)
  output_tokens = lengths(rng, requests, 180, 0.8)
  for group, start_s, tokens in zip(groups, starts_s, prefix_tokens, strict=True):
    prefix = ids.take(int(tokens))
    for twin in range(int(group)):
      at_s = float(start_s) + (0.0 if twin == 0 else float(rng.uniform(0.0, 0.9)))
      index = len(drafts)
      prompt_ids = np.concatenate([prefix, ids.take(int(tail_tokens[index]))])
      drafts.append((at_s, prompt_ids, ids.take(int(output_tokens[index]))))
  drafts.sort(key=lambda draft: draft[0])
  return Workload(
    name="toolagent_like",
    requests=tuple(
      Request(
        request_id=request_id, prompt_ids=prompt_ids, max_new_tokens=len(output_ids),
        arrival_s=at_s, forced_output_ids=output_ids,
      )
      for request_id, (at_s, prompt_ids, output_ids) in enumerate(drafts)
    ),
  )  # fmt: skip


def no_reuse(
  *, requests: int = 500, input_tokens: int = 4000, output_tokens: int = 64, seed: int = 0
) -> Workload:
  """A negative control: no two prompts share a token."""
  rng = _rng("no_reuse", seed)
  ids = TokenIds()
  return Workload(
    name="no_reuse",
    requests=tuple(
      Request(
        request_id=index, prompt_ids=ids.take(int(prompt)), max_new_tokens=int(output),
        forced_output_ids=ids.take(int(output)),
      )
      for index, (prompt, output) in enumerate(
        zip(
          lengths(rng, requests, input_tokens, _CONTEXT_VARIATION),
          lengths(rng, requests, output_tokens, _OUTPUT_VARIATION),
          strict=True,
        )
      )
    ),
  )  # fmt: skip


def lengths(
  rng: np.random.Generator, count: int, mean: float, variation: float, minimum: int = 1
) -> np.ndarray:
  """Gamma-distributed lengths, int64 [count], whose sum is round(mean * count) exactly."""
  shape = 1.0 / variation**2
  drawn = rng.gamma(shape, 1.0, count)
  drawn = np.maximum(drawn * (mean * count / drawn.sum()), minimum)
  result = np.floor(drawn).astype(np.int64)
  missing = round(mean * count) - int(result.sum())
  # Hand the difference out one token at a time, to entries in turn that stay above the minimum.
  step = 1 if missing > 0 else -1
  while missing:
    open_entries = np.flatnonzero(result + step >= minimum)
    if not len(open_entries):
      raise ValueError(f"lengths: a mean of {mean} is below the minimum of {minimum}")
    chosen = open_entries[: abs(missing)]
    result[chosen] += step
    missing -= step * len(chosen)
  return result


def _turns(rng: np.random.Generator, shape: ConversationShape) -> np.ndarray:
  """Turns of each conversation, int64 [conversations], summing to the requests."""
  return lengths(rng, shape.conversations, shape.requests / shape.conversations, 0.4)


def _rng(name: str, seed: int) -> np.random.Generator:
  return np.random.default_rng([seed, zlib.crc32(name.encode())])


GENERATORS: dict[str, Callable[[int], Workload]] = {
  **{
    f"loogle_like_{order}": lambda seed, order=order: documents(LOOGLE, order=order, seed=seed)
    for order in ORDERS
  },
  "loogle_like": lambda seed: documents(LOOGLE, seed=seed),
  "narrativeqa_like": lambda seed: documents(NARRATIVEQA, seed=seed),
  "reviewmt_like": lambda seed: conversations(REVIEWMT, seed=seed),
  "sharegpt_like": lambda seed: conversations(SHAREGPT, seed=seed),
  "toolagent_like": lambda seed: toolagent(seed=seed),
  "no_reuse": lambda seed: no_reuse(seed=seed),
}
