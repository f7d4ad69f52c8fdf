"""An executor for tests whose KV is the token ids themselves.

Pages hold token ids (a device pool and a host pool, int32 [pages, page_size]); a chunk and a decode
step check that every position of their context holds the id it has to, so that a page that was
freed, overwritten, loaded or backed up at a wrong time is found at once. Time is virtual. Moves
take a time of their own: a load reads its host slots only when it ends, and until then what it
writes is poison; so are host slots under a backup.
"""

import heapq
import itertools
import zlib

import numpy as np

from strata_jax.config import CacheConfig
from strata_jax.executors.protocol import (
  BackupDone,
  Event,
  LoadDone,
  SamplingParams,
  StepDone,
  StepWork,
)

VOCABULARY = 97
_POISON = -7


class PageCheckingExecutor:
  """See the module. `move_s` is the longest time a move takes, drawn by seed."""

  def __init__(self, cache: CacheConfig, *, seed: int = 0, move_s: float = 0.05) -> None:
    shape = (cache.device_pages, cache.page_size)
    self.device = np.full(shape, _POISON, np.int32)
    self.host = np.full((cache.host_pages, cache.page_size), _POISON, np.int32)
    self.page_size = cache.page_size
    self.steps = 0
    self.computed_tokens = 0
    self.registered: dict[int, np.ndarray | None] = {}
    self.contexts: dict[int, list[int]] = {}  # prompt and outputs, set by `expect`
    self.prompts: dict[int, int] = {}
    self._rng = np.random.default_rng(seed)
    self._move_s = move_s
    self._clock_s = 0.0
    self._events: list[tuple[float, int, object]] = []  # heap of (time, order, what)
    self._order = itertools.count()
    self._loads: dict[int, float] = {}  # transfer id: when it ends
    self._busy = False

  def expect(self, request_id: int, prompt_ids: np.ndarray) -> None:
    """Tells the prompt of a request, to check its context with."""
    self.contexts[request_id] = prompt_ids.tolist()
    self.prompts[request_id] = len(prompt_ids)

  def now_s(self) -> float:
    return self._clock_s

  def register(
    self, request_id: int, sampling: SamplingParams, forced_output_ids: np.ndarray | None
  ) -> None:
    assert request_id not in self.registered
    self.registered[request_id] = forced_output_ids

  def release(self, request_id: int) -> None:
    del self.registered[request_id]

  def launch(self, work: StepWork) -> None:
    now_s = self._clock_s
    for backup in work.backups:
      assert len(set(backup.host_slots)) == len(backup.host_slots)
      contents = self.device[backup.device_slots].copy()
      assert (contents != _POISON).all(), "a backup of pages that nothing has written"
      self.host[backup.host_slots] = _POISON
      self._push(now_s + self._draw_s(), (backup, contents))
    for load in work.loads:
      assert len(set(load.device_slots)) == len(load.device_slots)
      self.device[load.device_slots] = _POISON
      self._loads[load.transfer_id] = now_s + self._draw_s()
      self._push(self._loads[load.transfer_id], load)
    if not work.computes:
      return
    assert not self._busy, "two computing steps at once"
    self._busy = True
    self.steps += 1
    waits = [self._loads.get(i, now_s) for prefill in work.prefills for i in prefill.waits_for]
    started_s = max([now_s, *waits])
    prefill_end_s = started_s + 1e-4 * sum(len(prefill.token_ids) for prefill in work.prefills)
    end_s = prefill_end_s + (1e-3 * work.decode_steps if work.decodes else 0.0)
    self._push(end_s, (work, now_s, started_s, prefill_end_s))

  def wait(self, until_s: float | None) -> list[Event]:
    assert self._events or until_s is not None, "waits for nothing"
    if not self._events or (until_s is not None and until_s < self._events[0][0]):
      assert until_s is not None
      self._clock_s = max(self._clock_s, until_s)
      return []
    at_s, _, what = heapq.heappop(self._events)
    self._clock_s = at_s
    return [self._finish(at_s, what)]

  def _push(self, at_s: float, what: object) -> None:
    heapq.heappush(self._events, (at_s, next(self._order), what))

  def _draw_s(self) -> float:
    return float(self._rng.uniform(0, self._move_s))

  def _finish(self, at_s: float, what) -> Event:
    if isinstance(what, tuple) and len(what) == 2:
      backup, contents = what
      self.host[backup.host_slots] = contents
      return BackupDone(backup.transfer_id, at_s)
    if not isinstance(what, tuple):
      contents = self.host[what.host_slots]
      assert (contents != _POISON).all(), "a load read host slots before they were written"
      self.device[what.device_slots] = contents
      del self._loads[what.transfer_id]
      return LoadDone(what.transfer_id, at_s)
    work, launched_s, started_s, prefill_end_s = what
    self._busy = False
    tokens: dict[int, tuple[int, ...]] = {}
    for prefill in work.prefills:
      context = self._context(prefill.request_id)
      end = prefill.start + len(prefill.token_ids)
      assert len(prefill.page_table) == -(-end // self.page_size)
      assert prefill.token_ids.tolist() == context[prefill.start : end], "other tokens"
      self._check(prefill.page_table, context[: prefill.start])
      self._write(prefill.page_table, prefill.start, prefill.token_ids)
      self.computed_tokens += len(prefill.token_ids)
      if prefill.samples:
        assert end == len(context), "samples before the prompt's end"
        tokens[prefill.request_id] = (self._sample(prefill.request_id),)
    for decode in work.decodes:
      context = self._context(decode.request_id)
      assert decode.position == len(context) - 1
      assert decode.token_id == context[-1]
      new = []
      for step in range(work.decode_steps):
        position = decode.position + step
        self._check(decode.page_table, context[:position])
        self._write(decode.page_table, position, np.asarray(context[position:]))
        new.append(self._sample(decode.request_id))
      tokens[decode.request_id] = tuple(new)
    return StepDone(
      step_id=work.step_id,
      started_s=launched_s,
      at_s=at_s,
      tokens=tokens,
      prefill_end_s=prefill_end_s,
      compute_s=prefill_end_s - started_s,
      stall_s=started_s - launched_s if work.prefills else 0.0,
    )

  def _context(self, request_id: int) -> list[int]:
    assert request_id in self.registered, "works for a request that is over"
    return self.contexts[request_id]

  def _check(self, page_table: np.ndarray, context: list[int]) -> None:
    held = self.device[page_table].reshape(-1)[: len(context)]
    assert held.tolist() == context, "the pages hold other tokens than the context"

  def _write(self, page_table: np.ndarray, start: int, token_ids: np.ndarray) -> None:
    for position, token in enumerate(token_ids, start=start):
      self.device[page_table[position // self.page_size], position % self.page_size] = token

  def _sample(self, request_id: int) -> int:
    context, forced = self.contexts[request_id], self.registered[request_id]
    token = next_token(context)
    if forced is not None:
      index = len(context) - self.prompts[request_id]
      token = int(forced[index]) if index < len(forced) else 0
    context.append(token)
    return token


def next_token(context: list[int]) -> int:
  """The greedy continuation of this executor's model."""
  return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCABULARY


def continuation(prompt_ids: np.ndarray, tokens: int) -> list[int]:
  """What it generates after a prompt."""
  context = prompt_ids.tolist()
  for _ in range(tokens):
    context.append(next_token(context))
  return context[len(prompt_ids) :]
