"""The keys that are kept of look-ups."""

import threading

import numpy as np

from strata_jax.executors import look_up_keys
from strata_jax.executors.look_up_keys import LookUpKeys
from strata_jax.executors.protocol import LookUpWork
from strata_jax.page_keys import page_keys, root_key

PAGE_SIZE = 4
ROOT = root_key("model")


def look_up(first: int, pages: int = 2) -> LookUpWork:
  ids = np.arange(first, first + pages * PAGE_SIZE, dtype=np.int32)
  return LookUpWork(work_id=0, request_id=0, parent_key=ROOT, token_ids=ids, skip_pages=1)


def expected(work: LookUpWork) -> list[bytes]:
  return page_keys(ROOT, work.token_ids, PAGE_SIZE)


def test_keys_are_made_once_while_they_are_used(monkeypatch):
  made = []

  def count(*arguments):
    made.append(arguments)
    return page_keys(*arguments)

  monkeypatch.setattr(look_up_keys, "page_keys", count)
  keys = LookUpKeys(PAGE_SIZE, capacity=3)
  kept, others = look_up(0), [look_up(100 * i) for i in range(1, 6)]
  for other in others:
    assert keys.of(kept) == expected(kept)
    assert keys.of(other) == expected(other)
    assert len(keys) <= 3
  assert len(made) == 6
  assert keys.of(others[0]) == expected(others[0])  # dropped, made again
  assert len(made) == 7
  keys.clear()
  assert len(keys) == 0
  assert keys.of(kept) == expected(kept)
  assert len(made) == 8


def test_several_threads_get_the_right_keys():
  keys = LookUpKeys(PAGE_SIZE, capacity=4)
  works = [look_up(100 * i) for i in range(12)]
  wrong = []

  def ask(seed: int) -> None:
    for i in np.random.default_rng(seed).integers(0, 12, 200).tolist():
      if keys.of(works[i]) != expected(works[i]):
        wrong.append(i)

  threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not wrong
  assert len(keys) <= 4
