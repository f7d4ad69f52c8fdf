"""Drives a CacheController by hand: an executor whose events come when the test says so.

KV is the token ids themselves. A pool of pages [pages, page_size] a tier holds them; a chunk, a
decode step, a load and a backup check what they read. A backup reads its device pages when it is
launched if it evicts, else when it is done; a load reads host pages only when it is done. So a page
that is freed, reused or unlocked too early is found.
"""

import numpy as np

from strata_jax.cache_controller import Applied, CacheController
from strata_jax.config import CacheConfig, ServingConfig
from strata_jax.executors.protocol import (
  BackupDone,
  BackupWork,
  LoadDone,
  LoadWork,
  StepDone,
  StepWork,
)
from strata_jax.scheduler.views import Load, Prefill, RequestView, SchedulerView, StepPlan
from strata_jax.workloads.request import Request

POISON = -7
HERE = ("device", "loading")


def tokens(*runs: tuple[int, int]) -> np.ndarray:
  """int32 [sum of counts]: runs of (first id, count)."""
  parts = [np.arange(first, first + count, dtype=np.int32) for first, count in runs]
  return np.concatenate(parts)


class Harness:
  """A controller with page contents, a plan builder, and events that wait to be let through."""

  def __init__(
    self,
    *,
    page_size: int = 4,
    device_pages: int = 16,
    host_pages: int = 64,
    step_tokens: int = 64,
    decode_steps: int = 1,
    context_tokens: int | None = None,
    checks: bool = True,
    **cache,
  ) -> None:
    self.page_size = page_size
    self.controller = CacheController(
      CacheConfig(
        page_size=page_size,
        device_tokens=device_pages * page_size,
        host_tokens=host_pages * page_size,
        **cache,
      ),
      ServingConfig(step_tokens=step_tokens, decode_steps=decode_steps),
      context_tokens=context_tokens,
    )
    self.checks = checks
    self.device = np.full((device_pages, page_size), POISON, np.int32)
    self.host = np.full((host_pages, page_size), POISON, np.int32)
    self.loads: dict[int, LoadWork] = {}
    self.backups: dict[int, tuple[BackupWork, np.ndarray | None]] = {}
    self.step: StepWork | None = None
    self.contexts: dict[int, list[int]] = {}  # prompt and outputs
    self.prompts: dict[int, int] = {}
    self.computed: dict[int, list[tuple[int, int]]] = {}  # chunks by request
    self.admissions: dict[int, list] = {}
    self._next_id = 0

  # Requests.

  def add(self, prompt: np.ndarray, outputs: int = 1, **fields) -> int:
    request_id = self._next_id
    refusal = self.try_add(prompt, outputs, **fields)
    assert refusal is None, refusal
    return request_id

  def try_add(self, prompt: np.ndarray, outputs: int = 1, **fields) -> str | None:
    request_id = self._next_id
    request = Request(
      request_id=request_id, prompt_ids=prompt, max_new_tokens=outputs, arrival_s=0.0, **fields
    )
    refusal = self.controller.add(request, 0.0)
    if refusal is None:
      self._next_id += 1
      self.contexts[request_id] = prompt.tolist()
      self.prompts[request_id] = len(prompt)
      self.computed[request_id] = []
    self.check()
    return refusal

  def abort(self, request_id: int) -> None:
    self.controller.abort(request_id, 0.0)
    self.check()

  def finish(self, request_id: int, output_tokens: int | None = None) -> None:
    self.controller.finish(request_id, 0.0, output_tokens=output_tokens)
    self.check()

  # Views and plans.

  def view(self) -> SchedulerView:
    view = self.controller.view(0.0)
    self.check()
    pages = view.free_pages + view.evictable_pages
    assert 0 <= pages <= view.capacity_pages
    for request in view.waiting:
      assert request.prompt_tokens == len(self.contexts[request.request_id])
    return view

  def waiting(self, request_id: int) -> RequestView:
    return next(r for r in self.view().waiting if r.request_id == request_id)

  def path(self, request_id: int) -> list[tuple[str, int]]:
    """The path of a waiting request as (state, tokens)."""
    return [(span.state, span.tokens) for span in self.waiting(request_id).path]

  def entry(
    self, view: SchedulerView, request_id: int, *, chunk: int | None = None, load: bool = True
  ) -> Prefill:
    """Admits or continues with all that can be had, then computes at most `chunk` tokens."""
    for request in (*view.waiting, *view.running):
      if request.request_id == request_id:
        break
    else:
      raise AssertionError(f"{request_id} is not in the view")
    start = getattr(request, "context_tokens", 0)
    prompt = start + sum(span.tokens for span in request.path) + request.tail_tokens
    loads = []
    for span in request.path:
      if span.state == "host" and load:
        loads.append(Load(span.node_id, span.tokens))
      elif span.state not in HERE:
        break
      start += span.tokens
    end = prompt
    if chunk is not None and start + chunk < prompt:
      end = start + max(chunk // self.page_size, 1) * self.page_size
    return Prefill(request_id, tuple(loads), start, min(end, prompt))

  def apply(self, **fields) -> Applied:
    """Applies a plan for the latest view and launches its work."""
    fields.setdefault("version", self.controller._version)
    applied = self.controller.apply(StepPlan(**fields), 0.0)
    for admission in applied.admitted:
      self.admissions.setdefault(admission.request_id, []).append(admission)
    if applied.work is not None:
      self.launch(applied.work)
    self.check()
    return applied

  def prefill(self, *request_ids: int, chunk: int | None = None, **fields) -> Applied:
    view = self.view()
    entries = tuple(self.entry(view, request_id, chunk=chunk) for request_id in request_ids)
    return self.apply(prefill=entries, **fields)

  def flush(self) -> StepWork | None:
    work = self.controller.flush(0.0)
    if work is not None:
      self.launch(work)
    self.check()
    return work

  # The executor.

  def launch(self, work: StepWork) -> None:
    for backup in work.backups:
      assert len(set(backup.host_slots.tolist())) == len(backup.host_slots)
      contents = self._read(self.device, backup.device_slots)
      self.host[backup.host_slots] = POISON
      self.backups[backup.transfer_id] = (backup, contents if backup.evicts else None)
    for load in work.loads:
      assert len(set(load.device_slots.tolist())) == len(load.device_slots)
      self.device[load.device_slots] = POISON
      self.loads[load.transfer_id] = load
    for prefill in work.prefills:
      assert set(prefill.waits_for) <= self.loads.keys(), "waits for what has come"
    if work.computes:
      assert self.step is None
      self.step = work

  def load_done(self, transfer_id: int | None = None) -> None:
    transfer_id = next(iter(self.loads)) if transfer_id is None else transfer_id
    load = self.loads.pop(transfer_id)
    self.device[load.device_slots] = self._read(self.host, load.host_slots)
    self.controller.complete(LoadDone(transfer_id, 0.0), 0.0)
    self.check()

  def backup_done(self, transfer_id: int | None = None, *, ok: bool = True) -> None:
    transfer_id = next(iter(self.backups)) if transfer_id is None else transfer_id
    backup, contents = self.backups.pop(transfer_id)
    if ok:
      if contents is None:
        contents = self._read(self.device, backup.device_slots)
      self.host[backup.host_slots] = contents
    self.controller.complete(BackupDone(transfer_id, 0.0, ok), 0.0)
    self.check()

  def transfers_done(self) -> None:
    while self.loads:
      self.load_done()
    while self.backups:
      self.backup_done()

  def step_done(self) -> dict[int, tuple[int, ...]]:
    """Computes the step under way, after the loads that it waits for."""
    step = self.step
    assert step is not None
    for prefill in step.prefills:
      for transfer_id in prefill.waits_for:
        if transfer_id in self.loads:
          self.load_done(transfer_id)
    sampled: dict[int, tuple[int, ...]] = {}
    for prefill in step.prefills:
      context = self.contexts[prefill.request_id]
      end = prefill.start + len(prefill.token_ids)
      assert prefill.token_ids.tolist() == context[prefill.start : end]
      assert len(prefill.page_table) == -(-end // self.page_size)
      self._check_context(prefill.page_table, context[: prefill.start])
      self._write(prefill.page_table, prefill.start, context[prefill.start : end])
      self.computed[prefill.request_id].append((prefill.start, end))
      if prefill.samples:
        assert end == len(context)
        sampled[prefill.request_id] = (self._sample(prefill.request_id),)
    for decode in step.decodes:
      context = self.contexts[decode.request_id]
      assert decode.position == len(context) - 1
      assert decode.token_id == context[-1]
      new = []
      for _ in range(step.decode_steps):
        self._check_context(decode.page_table, context[:-1])
        self._write(decode.page_table, len(context) - 1, context[-1:])
        new.append(self._sample(decode.request_id))
      sampled[decode.request_id] = tuple(new)
    self.step = None
    outputs = self.controller.complete(StepDone(step.step_id, 0.0, 0.0, sampled), 0.0)
    self.check()
    return dict(outputs)

  def run(self, prompt: np.ndarray, outputs: int = 1, **fields) -> int:
    """Serves one request alone, from arrival to end, and lets all transfers finish."""
    request_id = self.add(prompt, outputs, **fields)
    applied = self.prefill(request_id)
    assert not applied.stale
    self.step_done()
    for _ in range(outputs - 1):
      self.view()
      self.apply(decode=(request_id,))
      self.step_done()
    self.finish(request_id)
    self.flush()
    self.transfers_done()
    return request_id

  # Looking.

  def check(self) -> None:
    if self.checks:
      self.controller.check()

  def free_pages(self) -> tuple[int, int]:
    """Device and host pages that are free or could be."""
    tiers = self.controller.tiers
    return (
      tiers.device.free_pages + tiers.tree.pages[0].evictable,
      tiers.host.free_pages + tiers.tree.pages[1].evictable,
    )

  def held(self, prompt: np.ndarray, **namespace) -> tuple[int, int]:
    """Tokens of a prompt that the device and the host have."""
    match = self.controller.tree.match(prompt, **namespace)
    return match.held_tokens(0), match.held_tokens(1)

  def hits(self, request_id: int) -> tuple[int, int]:
    """Device and host hits of a request at its first admission."""
    admission = self.admissions[request_id][0]
    return admission.device_hit_tokens, admission.host_hit_tokens

  def _read(self, pool: np.ndarray, slots: np.ndarray) -> np.ndarray:
    contents = pool[slots].copy()
    assert (contents != POISON).all(), "reads pages that nothing has written"
    return contents

  def _check_context(self, page_table: np.ndarray, context: list[int]) -> None:
    held = self.device[page_table].reshape(-1)[: len(context)]
    assert held.tolist() == context, "the pages hold other tokens than the context"

  def _write(self, page_table: np.ndarray, start: int, ids: list[int]) -> None:
    for position, token in enumerate(ids, start=start):
      self.device[page_table[position // self.page_size], position % self.page_size] = token

  def _sample(self, request_id: int) -> int:
    context = self.contexts[request_id]
    token = 1000 + (sum(context) * 31 + len(context)) % 50
    context.append(token)
    return token
