"""Costs timed before a run: exact on a simulated machine, and what a real run makes of them."""

import json

import pytest

from experiments import measured_costs, restart, serve
from strata_jax import profile as profile_lib
from strata_jax import recording
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.protocol import LoadDone
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.simulated_storage import SimulatedStorage
from strata_jax.executors.timeline import CostTimeline
from strata_jax.scheduler.views import Costs
from strata_jax.tiers import store_upkeep
from strata_jax.tiers.memory_store import MemoryStore

PAGE_SIZE = 16


class ForgetfulStore(MemoryStore):
  """Notes what is taken out."""

  def __init__(self):
    super().__init__(page_bytes=1)
    self.deleted: list[bytes] = []

  def delete(self, keys):
    self.deleted += keys
    return len(keys)


@pytest.fixture(scope="module")
def model() -> CostModel:
  machine = profile_lib.load("h200_llama31_8b")
  return CostModel(machine, IoConfig(page_size=PAGE_SIZE))


def measure(model: CostModel, *, storage: bool = True, **changes) -> tuple[Costs, ForgetfulStore]:
  token_bytes = model.profile.kv_bytes_token
  simulated = SimulatedStorage(
    model.profile.storage, page_bytes=token_bytes * PAGE_SIZE, page_size=PAGE_SIZE
  )
  store = ForgetfulStore()
  sizes = {"device_pages": 4096, "host_pages": 4096, "chunk_tokens": 4096} | changes
  executor = SimulatedExecutor(CostTimeline(model), simulated)
  costs = measured_costs.measure(
    executor, page_size=PAGE_SIZE, context_tokens=32768, read_tokens=1024,
    store=store if storage else None, **sizes,
  )  # fmt: skip
  return costs, store


def test_they_are_the_costs_of_the_machine(model):
  costs, store = measure(model)
  right = model.costs()
  assert costs.load_s_per_token == pytest.approx(right.load_s_per_token)
  assert costs.load_latency_s == pytest.approx(right.load_latency_s)
  assert costs.decode_step_s == pytest.approx(right.decode_step_s)
  latency_s = model.profile.storage.latency_s  # once a read
  assert costs.prefetch_s_per_token == pytest.approx(right.prefetch_s_per_token + latency_s / 1024)
  for start, end in ((0, 4096), (28672, 32768)):  # what was timed, with all of a pass
    mean = (start + end) / 2
    linear_s = (end - start) * (
      costs.compute_s_per_token + costs.compute_s_per_token_context * mean
    )
    assert linear_s == pytest.approx(model.prefill_s([(end - start, start)]), rel=1e-3)
  assert len(store.deleted) == 1024 // PAGE_SIZE


def test_loads_in_calls_of_equal_size_cost_what_the_calls_cost(model):
  class Calls(SimulatedExecutor):
    """Loads 128 pages in 10 ms, fewer as well."""

    def launch(self, work):
      super().launch(work)
      self.loads = [-(-len(load.host_slots) // 128) * 0.01 for load in work.loads]
      self.began_s = self.now_s()

    def wait(self, until_s):
      return [
        event._replace(at_s=self.began_s + self.loads[0])
        if isinstance(event, LoadDone) else event
        for event in super().wait(until_s)
      ]  # fmt: skip

  costs = measured_costs.measure(
    Calls(CostTimeline(model)), page_size=PAGE_SIZE, device_pages=4096, host_pages=4096,
    chunk_tokens=4096, context_tokens=32768, read_tokens=1024,
  )  # fmt: skip
  # One page less than 16 calls: the last page computes what waits.
  assert costs.load_s_per_token == pytest.approx(0.01 / (128 * PAGE_SIZE), rel=1e-3)
  assert costs.load_latency_s == pytest.approx(0.0, abs=1e-9)


def test_what_is_not_there_is_unknown(model):
  costs, store = measure(model, storage=False)
  assert costs.prefetch_s_per_token == 0.0
  assert costs.load_s_per_token > 0.0
  assert not store.deleted
  costs, _ = measure(model, host_pages=0)
  assert (costs.load_s_per_token, costs.prefetch_s_per_token) == (0.0, 0.0)
  assert costs.compute_s_per_token > 0.0


def test_pools_of_one_page(model):
  costs, store = measure(model, device_pages=1, host_pages=1)
  assert costs.compute_s_per_token > 0.0
  assert costs.compute_s_per_token_context == 0.0
  assert costs.load_s_per_token == 0.0  # there is no room for what waits for it
  assert len(store.deleted) == 1
  costs, _ = measure(model, device_pages=2, host_pages=1)
  assert costs.load_s_per_token > 0.0


TINY = [
  "--weights=random", "--model=tiny", "--document_tokens=150", "--documents=3", "--page_size=8",
  "--device_tokens=512", "--host_tokens=2048", "--step_tokens=64", "--max_new_tokens=2",
  "--ttft_visits=0", "--min_prefetch_tokens=8",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_waits_by_cost_is_shown_them(tmp_path, capsys):
  """Nothing stays in the store of the 128 pages that are timed; a run's own may differ by a few."""
  url = str(tmp_path / "store")

  def run(*arguments: str) -> tuple[dict, set[Costs], int]:
    record = tmp_path / "record.jsonl"
    given = [*TINY, f"--out={tmp_path / 'run'}", f"--store={url}", f"--record={record}"]
    serve.main(serve.FLAGS.parse([*given, *arguments]))
    shown = {view.costs for view, _ in recording.read_record(record).decisions()}
    (holding,) = store_upkeep.open_upkeep(url).inspect().holdings
    return json.loads(capsys.readouterr().out.splitlines()[-1]), shown, holding.pages

  summary, shown, stored = run()
  assert shown == {Costs()}
  assert stored > 0

  summary, shown, pages = run("--prefetch=cost")
  costs = Costs(**summary["costs"])
  assert shown == {costs}
  assert costs.compute_s_per_token > 0.0
  assert costs.load_s_per_token > 0.0
  assert costs.prefetch_s_per_token > 0.0
  assert costs.decode_step_s > 0.0
  assert abs(pages - stored) < 10
  assert summary["recompiles"] == 0

  _, shown, _ = run("--system=ct_hpkv_like")
  assert min(min(c.load_s_per_token, c.compute_s_per_token) for c in shown) > 0.0

  summary, shown, pages = run("--prefetch=cost", "--costs=unknown")
  assert shown == {Costs()}
  assert abs(pages - stored) < 10


OWN = """
import pathlib
from strata_jax.scheduler.policies import plan_step, stages_of

def mine(view, config):
  seen = [view.costs.load_s_per_token, view.costs.compute_s_per_token]
  pathlib.Path({path!r}).write_text(str(seen))
  return plan_step(view, config, stages_of(config))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [serve, restart])
def test_a_policy_of_ones_own_is_shown_them_unless_told_otherwise(program, tmp_path, capsys):
  seen = tmp_path / "seen"
  file = tmp_path / "mine.py"
  file.write_text(OWN.format(path=str(seen)))
  given = [*TINY, f"--out={tmp_path / 'run'}", f"--store={tmp_path / 's'}", f"--policy={file}:mine"]
  if program is restart:
    given.append("--phase=first")
  program.main(program.FLAGS.parse(given))
  assert min(json.loads(seen.read_text())) > 0.0
  program.main(program.FLAGS.parse([*given, "--costs=unknown"]))
  assert json.loads(seen.read_text()) == [0.0, 0.0]
