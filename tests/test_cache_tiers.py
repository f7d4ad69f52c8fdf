"""CacheTiers without requests: what evictions and loads leave of a path."""

import numpy as np
import pytest

from strata_jax.config import CacheConfig
from strata_jax.controller.results import ControllerStats
from strata_jax.controller.tiers import CacheTiers
from strata_jax.controller.waiting_line import WaitingLine
from strata_jax.executors.protocol import LoadDone
from strata_jax.radix_tree import DEVICE, HOST
from strata_jax.tree_checks import check_slots, check_tree

PAGES = 40


def make(joins):
  config = CacheConfig(page_size=2, device_tokens=2 * 64, host_tokens=2 * 64)
  tiers = CacheTiers(config, "test", ControllerStats())
  tiers.joins = joins
  slots = tiers.device.allocate(PAGES)
  (node,) = tiers.tree.insert(np.arange(2 * PAGES), slots).nodes
  tiers.tree.attach(node, HOST, tiers.host.allocate(PAGES))
  return tiers, node


@pytest.mark.parametrize("joins", [True, False])
def test_a_path_does_not_break_up_by_evictions_and_loads(joins):
  tiers, node = make(joins)
  rng = np.random.default_rng(0)
  for _ in range(30):
    room = tiers.device.free_pages + int(rng.integers(1, PAGES))
    tiers.device.free(tiers.allocate(room))
    path = node.path()
    missing = [step for step in path if step.slots[DEVICE] is None]
    pages = sum(len(step.tokens) for step in missing) // 2
    load = tiers.load(missing, tiers.allocate(pages), request_id=0)
    tiers.tree.touch(node)
    tiers.load_done(LoadDone(load.transfer_id, 0.0))
    check_tree(tiers.tree)
    check_slots(tiers.tree, DEVICE, tiers.device)
    check_slots(tiers.tree, HOST, tiers.host)
    if joins:
      assert node.path() == [node]
  if not joins:
    assert len(node.path()) > 10


def test_a_node_that_was_joined_counts_as_progress():
  tiers, node = make(True)
  line = WaitingLine(tiers)
  upper = tiers.tree.split(node, 10)
  gone = node.id
  before = line._progress((upper.id, gone))
  tiers.tree.join(node)
  assert gone not in tiers.tree.nodes
  assert line._progress((upper.id, gone)) > before
