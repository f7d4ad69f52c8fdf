"""Drives a JaxExecutor with hand-made steps: one request at a time, slots chosen by the test."""

import numpy as np

from strata_jax.executors import buckets, jax_executor, protocol

CHUNKS = (16, 64, 256)


def make_executor(
  config,
  params,
  page_size,
  *,
  device_pages,
  host_pages=0,
  context=512,
  prefill_rows=(1,),
  chunks=CHUNKS,
  joint_tokens=0,
  kv_dtype=None,
  **options,
):
  page_layout = config.page_layout(page_size, kv_dtype)
  return jax_executor.JaxExecutor(
    config,
    params,
    page_layout,
    device_pages=device_pages,
    host_pages=host_pages,
    buckets=buckets.Buckets(
      chunk_tokens=chunks,
      decode_requests=(1, 4),
      transfer_pages=(8, 64),
      table_pages=-(-context // page_size),
      prefill_rows=prefill_rows,
      joint_tokens=joint_tokens,
    ),
    **options,
  )


def pages(tokens, page_size):
  return -(-tokens // page_size)


class Driver:
  """Launches one step at a time and waits for all its events."""

  def __init__(self, executor, page_size):
    self.executor = executor
    self.page_size = page_size
    self.steps = 0

  def step(self, events=1, **work):
    """Launches and waits for `events` events."""
    self.executor.launch(protocol.StepWork(step_id=self.steps, **work))
    self.steps += 1
    got = []
    while len(got) < events:
      got += self.executor.wait(None)
    assert len(got) == events
    return got

  def prefill(self, request_id, token_ids, slots, start=0, samples=True):
    """Computes [start, len(token_ids)); the StepDone."""
    table = np.asarray(slots, np.int32)[: pages(len(token_ids), self.page_size)]
    work = protocol.PrefillWork(
      request_id=request_id, token_ids=np.asarray(token_ids[start:], np.int32), start=start,
      page_table=table, samples=samples,
    )  # fmt: skip
    return self.step(prefills=(work,))[0]

  def decode_work(self, request_id, token_id, position, slots, steps=1):
    table = np.asarray(slots, np.int32)[: pages(position + steps, self.page_size)]
    return protocol.DecodeWork(
      request_id=request_id, token_id=token_id, position=position, page_table=table
    )

  def generate(self, request_id, prompt, count, slots, start=0, sampling=None):
    """Prefill from `start`, then all decode steps at once; `count` output ids."""
    self.executor.register(request_id, sampling or protocol.SamplingParams(), None)
    first = self.prefill(request_id, prompt, slots, start).tokens[request_id]
    assert len(first) == 1
    work = self.decode_work(request_id, first[0], len(prompt), slots, count - 1)
    done = self.step(decodes=(work,), decode_steps=count - 1)[0]
    self.executor.release(request_id)
    return [*first, *done.tokens[request_id]]

  def backup(self, device_slots, host_slots):
    slots = [np.asarray(s, np.int32) for s in (device_slots, host_slots)]
    work = protocol.BackupWork(
      transfer_id=7, node_ids=(), device_slots=slots[0], host_slots=slots[1],
      tokens=len(device_slots) * self.page_size,
    )  # fmt: skip
    return self.step(backups=(work,))[0]

  def load_work(self, host_slots, device_slots, transfer_id=8):
    slots = [np.asarray(s, np.int32) for s in (host_slots, device_slots)]
    return protocol.LoadWork(
      transfer_id=transfer_id, request_id=0, node_ids=(), host_slots=slots[0],
      device_slots=slots[1], tokens=len(host_slots) * self.page_size,
    )  # fmt: skip

  def load(self, host_slots, device_slots):
    return self.step(loads=(self.load_work(host_slots, device_slots),))[0]
