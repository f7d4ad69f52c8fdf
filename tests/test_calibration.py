import dataclasses
import json

import numpy as np
import pytest

from strata_jax import (
  calibrated_profile,
  calibration,
  calibration_passes,
  calibration_steps,
  least_absolute,
  systems,
)
from strata_jax import profile as profiles
from strata_jax import simulation as sim
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors import prefill_batches, step_shapes
from strata_jax.executors.buckets import Buckets, smallest_bucket
from strata_jax.executors.protocol import (
  BackupWork,
  DecodeWork,
  LoadWork,
  PrefillWork,
  SamplingParams,
  StepWork,
)
from strata_jax.executors.simulated import SimulatedExecutor
from strata_jax.executors.timeline import CostTimeline
from strata_jax.profile import ExecutorCosts
from strata_jax.workloads import arrivals, synthetic

BASE = profiles.load("h200_llama31_8b")
SHAPE = dataclasses.replace(
  synthetic.LOOGLE, name="small", contexts=14, queries=330, mean_input_tokens=9000,
  mean_question_tokens=60,
)  # fmt: skip
FREE = ExecutorCosts(step_gap_s=1.5e-3, chunk_overhead_s=1e-3, decode_request_s=6e-5)
SHARED = dataclasses.replace(FREE, decode_shares=2)
HELD = dataclasses.replace(FREE, chunks_apart=1.0, loads_hold_compute=1.0, backups_hold_compute=0.6)


def perturbed(executor):
  """A machine that differs from the base in everything that can be fitted."""
  hardware, load = BASE.hardware, BASE.load
  slower = lambda table: profiles.RateTable(points=tuple((x, 0.8 * y) for x, y in table.points))
  return dataclasses.replace(
    BASE,
    hardware=dataclasses.replace(
      hardware,
      matmul_efficiency=0.6,
      attention_flops=0.7 * hardware.attention_flops,
      attention_read_bytes_per_s=0.6 * hardware.attention_read_bytes_per_s,
      weight_read_bytes_per_s=0.7 * hardware.weight_read_bytes_per_s,
      pass_overhead_s=2e-3,
      gate_s=1e-4,
      transfer_latency_s=2e-4,
    ),
    load=dataclasses.replace(
      load,
      kernel={blocks: slower(table) for blocks, table in load.kernel.items()},
      copies={name: slower(table) for name, table in load.copies.items()},
    ),
    interference={
      kind: profiles.Interference(prefill=0.3, decode=0.4) for kind in BASE.interference
    },
    executor=executor,
  )


def system(name):
  return dataclasses.replace(systems.system(name), page_size=16)


def run_steps(name, machine, rate=15.0):
  workload = arrivals.poisson(synthetic.documents(SHAPE), rate, 0)
  run = sim.simulate(
    workload, machine, system(name), whole_decodes=True,
    pools=sim.PoolSizes(device_tokens=60_000, host_tokens=200_000),
  )  # fmt: skip
  return [row._asdict() for row in run.result.steps]


def truth(machine, name):
  """The fitted keys of a machine, with its numbers."""
  io = sim.io_config(system(name))
  kind = "kernel" if io.load_backend == "kernel" else "copy"
  key = "load.kernel.2" if kind == "kernel" else f"load.{io.load_backend}"
  slow = machine.interference[kind]
  return {
    **{f"hardware.{field}": getattr(machine.hardware, field) for field in (
      "matmul_efficiency", "attention_flops", "attention_read_bytes_per_s",
      "weight_read_bytes_per_s", "pass_overhead_s", "gate_s", "transfer_latency_s")},
    **{f"executor.{key}": value for key, value in dataclasses.asdict(machine.executor).items()},
    f"interference.{kind}.prefill": slow.prefill,
    f"interference.{kind}.decode": slow.decode,
    key: CostModel(machine, io).load_rate / 1e9,
  }  # fmt: skip


@pytest.fixture(scope="module")
def rows():
  cache = {}

  def get(name, executor):
    if (name, executor) not in cache:
      cache[name, executor] = run_steps(name, perturbed(executor))
    return cache[name, executor]

  return get


@pytest.fixture(scope="module")
def fits(rows):
  cache = {}

  def get(name, executor):
    if (name, executor) not in cache:
      shares = executor.decode_shares
      cache[name, executor] = fit(rows(name, executor), name, decode_shares=shares)
    return cache[name, executor]

  return get


def fit(rows, name, **options):
  return calibration.calibrate(
    calibration_steps.read(rows, "steps.jsonl"), BASE, sim.io_config(system(name)), **options
  )


@pytest.mark.parametrize(
  ("name", "executor", "untold"),
  [
    ("strata", FREE, set()),
    ("strata", HELD, set()),
    ("strata", SHARED, set()),
    # First come, first served: every load is over before a decode step begins. Its slow copies
    # hide the compute beside them.
    pytest.param(
      "hicache_paper",
      FREE,
      {"interference.copy.prefill", "interference.copy.decode"},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_perturbed_numbers_are_found_again(fits, name, executor, untold):
  found = fits(name, executor)
  expected = truth(perturbed(executor), name)
  assert set(found.kept) == untold
  for key in expected.keys() - untold - {"executor.joint_pass_s"}:  # no pass is joint
    got = found.fitted[key].value
    assert got == pytest.approx(expected[key], rel=0.02, abs=1e-6), key
  assert max(one.median_error for one in found.residuals.values()) < 0.005


def test_what_is_read_once_makes_the_fit(rows):
  """The rate of attention comes from what is read, not from what is attended to."""
  some, key = rows("strata", SHARED), "hardware.attention_read_bytes_per_s"
  attended, read = (
    sum(row["decode_steps"] * row["decode_context_tokens"] for row in some),
    sum(row["decode_read_tokens"] for row in some),
  )
  assert read < 0.9 * attended
  old = [{k: v for k, v in row.items() if k != "decode_read_tokens"} for row in some]
  rate = perturbed(SHARED).hardware.attention_read_bytes_per_s
  assert fit(old, "strata").fitted[key].value > 1.05 * rate
  with pytest.raises(ValueError, match=r"decode_shares: expected more than 1, as .* got 1"):
    fit(some, "strata", decode_shares=1)


def test_rows_without_what_was_read_are_fitted_as_if_all_was(rows):
  some = rows("strata", FREE)
  zero = [{**row, "decode_read_tokens": 0} for row in some]
  old = [{k: v for k, v in row.items() if k != "decode_read_tokens"} for row in some]
  assert fit(zero, "strata").fitted == fit(old, "strata").fitted == fit(some, "strata").fitted


def with_noise(rows, share, outliers, seed=0):
  """Rows whose times are off: all a little, some by a factor."""
  rng = np.random.default_rng(seed)

  def factor():
    odd = rng.random() < outliers
    return float(np.exp(share * rng.standard_normal())) * (4.0 if odd else 1.0)

  result = []
  for row in rows:
    prefill_s, decode_s = (
      row["prefill_end_s"] - row["started_s"],
      row["ended_s"] - row["prefill_end_s"],
    )
    prefill_end_s = row["started_s"] + prefill_s * factor()
    changed = {"prefill_end_s": prefill_end_s, "ended_s": prefill_end_s + decode_s * factor()}
    changed["host_gap_s"] = 1.5e-3 * factor() if row["decode_requests"] else None
    result.append({**row, **changed})
  return result


# Slow steps are not forgotten: one in a hundred that takes four times as long makes all longer.
@pytest.mark.parametrize(("outliers", "rel"), [(0.0, 0.05), (0.01, 0.1)])
def test_noise_and_outliers_bend_little(rows, outliers, rel):
  found = fit(with_noise(rows("strata", HELD), 0.03, outliers), "strata")
  expected = truth(perturbed(HELD), "strata")
  for key in (
    "hardware.attention_flops", "hardware.weight_read_bytes_per_s", "load.kernel.2",
    "executor.loads_hold_compute", "executor.chunks_apart", "executor.step_gap_s",
  ):  # fmt: skip
    assert found.fitted[key].value == pytest.approx(expected[key], rel=rel), key
  io = sim.io_config(system("strata"))
  fitted, true = (CostModel(p, io) for p in (found.profile, perturbed(HELD)))
  for chunks in ([(50, 9000)], [(50, 9000), (70, 4000), (30, 12000)], [(8192, 0)]):
    assert fitted.prefill_s(chunks) == pytest.approx(true.prefill_s(chunks), rel=rel)
  for requests in (1, 8, 32):
    expected_s = true.decode_step_s(requests, 9000 * requests)
    assert fitted.decode_step_s(requests, 9000 * requests) == pytest.approx(expected_s, rel=rel)


def longer(rows, more_s):
  """Rows whose prefills take `more_s(row)[0]` longer, and decodes [1]."""
  result = []
  for row in rows:
    prefill_s, decode_s = more_s(row)
    result.append({
      **row, "prefill_end_s": row["prefill_end_s"] + prefill_s,
      "ended_s": row["ended_s"] + prefill_s + decode_s,
    })  # fmt: skip
  return result


@pytest.mark.parametrize("share", [0.0, 3.0])
def test_backups_are_not_blamed_for_what_the_costs_do_not_know_of(share):
  """Single decode steps take longer than the costs can say, and they alone have backups."""
  machine, io = perturbed(FREE), IoConfig(page_size=16, load_backend="none")
  rows = launched_rows(machine, io, BUCKETS, most_chunks=3, count=1200)
  token_s = CostModel(machine, io).token_bytes() / CostModel(machine, io).backup_rate
  rng = np.random.default_rng(1)
  single = lambda row: row["decode_steps"] == 1 and not row["prefill_requests"]
  backed = [
    {**row, "backup_tokens": 32 * int(rng.random() < 0.7) if single(row) else 0} for row in rows
  ]

  def more_s(row):
    held_s = share * token_s * row["backup_tokens"]
    return (held_s, 0.0) if row["prefill_requests"] else (0.0, held_s + 1e-3 * single(row))

  found = calibration.calibrate(
    calibration_steps.read(longer(backed, more_s), "x"), BASE, io, buckets=BUCKETS
  )
  assert found.fitted["executor.backups_hold_compute"].value == pytest.approx(share, abs=0.5)
  # With their backups known the decode fit has all the time of the steps.
  assert found.residuals["decode"].bias == pytest.approx(0.0, abs=1e-3)


def test_backups_that_every_step_has_tell_nothing(rows):
  some = [{**row, "backup_tokens": 64} for row in rows("strata", FREE)]
  why = fit(some, "strata").kept["executor.backups_hold_compute"]
  assert why == "fewer than 8 steps of a kind without backups to compare with"


def test_weights_are_read_no_faster_than_memory_is_copied():
  """Passes that take much longer than a decode step: what is fixed does not swallow the weights."""
  machine, io = perturbed(FREE), IoConfig(page_size=16, load_backend="none")
  rows = launched_rows(machine, io, BUCKETS, most_chunks=3)
  late = longer(rows, lambda row: (8e-3 if row["prefill_requests"] else 0.0, 0.0))
  found = calibration.calibrate(calibration_steps.read(late, "x"), BASE, io, buckets=BUCKETS)
  hardware = found.profile.hardware
  assert hardware.weight_read_bytes_per_s <= 1.001 * hardware.copy_bytes_per_s


@pytest.mark.slow
def test_the_base_is_found_in_its_own_steps():
  found = fit(run_steps("strata", BASE), "strata")
  for key, value in dataclasses.asdict(found.profile.executor).items():
    assert value == pytest.approx(getattr(BASE.executor, key), abs=1e-6)
  assert found.profile.hardware.weight_read_bytes_per_s == pytest.approx(3.6e12, rel=1e-3)


@pytest.mark.parametrize(
  ("keep", "message"),
  [
    (lambda row: not row["decode_requests"], "decode steps without loads beside them, got 0"),
    (lambda row: not row["prefill_requests"], "prefill steps without loads beside them, got 0"),
    (lambda row: not row["load_tokens"], "launches with loads, got 0"),
  ],
)
def test_too_few_steps_of_a_kind_are_refused(rows, keep, message):
  some = [row for row in rows("strata", FREE) if keep(row)]
  with pytest.raises(ValueError, match=f"^min_steps: expected at least 20 {message}"):
    fit(some, "strata")


def test_decode_steps_without_a_base_are_refused(rows):
  some = []
  for row in rows("strata", FREE):
    steps, requests = row["decode_steps"], row["decode_requests"]
    context = steps * row["decode_context_tokens"] + requests * steps * (steps + 1) / 2
    some.append({**row, "ended_s": row["prefill_end_s"] + 1e-7 * context})
  with pytest.raises(ValueError, match="expected decode steps that tell what one takes"):
    fit(some, "strata")


def test_rows_of_another_version_are_refused(rows):
  old = [{k: v for k, v in row.items() if k != "prefill_chunks"} for row in rows("strata", FREE)]
  message = r"old/steps\.jsonl, row 0: expected the field 'prefill_chunks', got none"
  with pytest.raises(ValueError, match=message):
    calibration_steps.read(old, "old/steps.jsonl")
  with pytest.raises(ValueError, match="expected rows of steps"):
    calibration_steps.read([], "x")


@pytest.mark.parametrize("name", ["h200_llama31_70b_tp4", "h200_deepseek_v3_tp8"])
def test_other_kinds_of_profiles_are_refused(rows, name):
  steps = calibration_steps.read(rows("strata", FREE), "x")
  with pytest.raises(ValueError, match="expected one device and a dense model"):
    calibration.calibrate(steps, profiles.load(name), sim.io_config(system("strata")))


def test_the_written_profile_is_the_fitted_one(fits, tmp_path):
  found = fits("strata", HELD)
  written = calibrated_profile.write(
    found, base="h200_llama31_8b", name="mine", out=tmp_path, source="run X, commit Y"
  )
  assert written == "mine_llama31_8b"
  loaded = sim.find_profile("mine", "llama31_8b", tmp_path)
  for part in ("hardware", "executor", "load", "backup", "storage", "model"):
    assert getattr(loaded, part) == getattr(found.profile, part), part
  assert loaded.interference == found.profile.interference
  for key, leaf in loaded.sources.items():
    if key in found.fitted:
      assert leaf["kind"] == "measured"
      assert "run X, commit Y" in leaf["source"]
      assert leaf["source"].startswith("said by") == (key == "executor.decode_shares")
    else:
      assert leaf == BASE.sources[key]
  text = (tmp_path / "hardware_mine.json").read_text()
  assert json.loads(text)["load"]["kernel"]["2"]["source"].count("its other points, measured") == 1


@pytest.mark.parametrize("name", ["", "h200", "a/b"])
def test_names_that_would_overwrite_are_refused(name):
  with pytest.raises(ValueError, match="name: expected the name of a new machine"):
    calibrated_profile.check_name(name, "h200_llama31_8b")


# What an executor adds, in the cost model and on the timeline


def timeline(**executor):
  machine = dataclasses.replace(BASE, executor=ExecutorCosts(**executor))
  return CostTimeline(CostModel(machine, sim.io_config(system("strata"))))


def slots(count):
  return np.arange(count, dtype=np.int32)


def load(pages, transfer_id=1):
  return LoadWork(
    transfer_id=transfer_id, request_id=0, node_ids=(), host_slots=slots(pages),
    device_slots=slots(pages), tokens=16 * pages,
  )  # fmt: skip


def prefill(tokens, start, **fields):
  return PrefillWork(
    request_id=0, token_ids=slots(tokens), start=start, page_table=slots(1), samples=True, **fields
  )


def test_a_launch_comes_a_gap_after_its_decision_and_backups_do_not():
  plain, late = timeline(), timeline(step_gap_s=0.5)
  work = StepWork(step_id=0, loads=(load(100),), prefills=(prefill(20, 0),))
  a, b = plain.start(work, 1.0), late.start(work, 1.0)
  assert (a.started_s, b.started_s) == (1.0, 1.5)
  assert b.prefill_end_s - a.prefill_end_s == pytest.approx(0.5)
  assert b.transfers[1] - a.transfers[1] == pytest.approx(0.5)
  backup = BackupWork(
    transfer_id=2, node_ids=(), device_slots=slots(9), host_slots=slots(9), tokens=144
  )
  alone = StepWork(step_id=1, backups=(backup,))
  assert late.start(alone, 9.0).transfers == plain.start(alone, 9.0).transfers


def test_chunks_and_requests_have_overheads_and_chunks_apart_read_the_weights_each():
  costs = lambda **executor: timeline(**executor).costs
  chunks = [(20, 1000), (30, 2000)]
  plain = costs()
  more = costs(chunk_overhead_s=1e-3, decode_request_s=1e-4)
  assert more.prefill_s(chunks) - plain.prefill_s(chunks) == pytest.approx(2e-3)
  assert more.decode_step_s(7, 100) - plain.decode_step_s(7, 100) == pytest.approx(7e-4)
  passes = costs(prefill_pass_s=1e-3, joint_pass_s=2e-3)
  assert passes.prefill_s(chunks) - plain.prefill_s(chunks) == pytest.approx(1e-3)
  assert passes.joint_s(chunks, 5, 100) - plain.joint_s(chunks, 5, 100) == pytest.approx(3e-3)
  assert passes.decode_step_s(7, 100) == plain.decode_step_s(7, 100)
  apart = costs(chunks_apart=1.0)
  weights_s = 2 * BASE.model.layer_params / BASE.hardware.weight_read_bytes_per_s
  assert apart.prefill_s(chunks) - plain.prefill_s(chunks) == pytest.approx(weights_s)
  assert apart.prefill_s(chunks[:1]) == pytest.approx(plain.prefill_s(chunks[:1]))


def test_compute_that_waits_for_loads_it_does_not_read():
  free, held = timeline(), timeline(loads_hold_compute=1.0)
  alone = StepWork(step_id=0, loads=(load(2000),))
  for one in (free, held):
    loaded_s = one.start(alone, 0.0).transfers[1]
  work = StepWork(step_id=1, prefills=(prefill(20, 0),))
  assert free.start(work, 0.0).prefill_end_s < loaded_s
  assert held.start(work, 0.0).prefill_end_s > loaded_s
  # Decode steps beside a load that is launched with them end no sooner than it.
  both = StepWork(step_id=2, loads=(load(2000, 5),), parked_loads=(5,))
  ends = []
  for one in (free, held):
    at_s = one.start(both, 10.0).transfers[5]
    ends.append((one.decode_end_s(2, 10.0, 1, 100), at_s))
  assert ends[0][0] < ends[0][1]
  assert ends[1][0] == ends[1][1]
  assert held.decode_end_s(3, ends[1][0], 1, 100) > ends[1][1]


def test_a_step_that_waits_for_its_backups():
  free, held = timeline(), timeline(backups_hold_compute=1.0)
  backup = BackupWork(
    transfer_id=2, node_ids=(), device_slots=slots(900), host_slots=slots(900), tokens=14400
  )
  work = StepWork(step_id=0, backups=(backup,), prefills=(prefill(20, 0),))
  a, b = free.start(work, 0.0), held.start(work, 0.0)
  wait_s = held.costs.backup_s(900) - BASE.hardware.transfer_latency_s
  assert b.prefill_end_s - a.prefill_end_s == pytest.approx(wait_s)
  assert b.compute_s - a.compute_s == pytest.approx(wait_s)
  assert a.stall_s == pytest.approx(b.stall_s, abs=1e-9)


# Rows and fits


def test_step_rows_say_what_their_times_depend_on(rows):
  some = rows("strata", FREE)
  for row in some:
    chunks = row["prefill_chunks"]
    assert len(chunks) == row["prefill_requests"]
    assert sum(new for new, _ in chunks) == row["prefill_tokens"]
    assert sum(before for _, before in chunks) == row["prefill_context_tokens"]
    assert (row["load_end_s"] is not None) == (row["load_tokens"] > 0)
    assert row["load_end_s"] is None or row["load_end_s"] > row["started_s"]
    assert row["decode_context_tokens"] >= 100 * row["decode_requests"]
  assert sum(row["load_end_s"] is not None for row in some) > 20


def test_a_fit_goes_through_the_many_and_not_the_odd_ones():
  rng = np.random.default_rng(1)
  features = np.stack([np.ones(300), rng.uniform(1, 50, 300)], axis=1)
  target = features @ np.array([3.0, 0.5])
  target[:60] *= rng.uniform(3, 9, 60)
  target[60:90] *= 1e-3
  found = least_absolute.fit(features, target)
  np.testing.assert_allclose(found, [3.0, 0.5], rtol=1e-3)


def test_no_coefficient_is_negative():
  x = np.linspace(1, 2, 50)
  features = np.stack([np.ones(50), x, np.zeros(50)], axis=1)
  found = least_absolute.fit(features, 4 - x)
  assert found[1] == found[2] == 0.0
  assert 2 <= found[0] <= 3


def test_the_smallest_loss_is_found_between_the_points_of_the_grid():
  place, loss = least_absolute.minimize(lambda x: abs(x - 0.7321) + 1, 0.0, 3.0)
  assert place == pytest.approx(0.7321, abs=1e-5)
  assert loss == pytest.approx(1.0, abs=1e-5)
  assert least_absolute.minimize(lambda x: x, 2.0, 3.0)[0] == pytest.approx(2.0, abs=1e-4)


def test_a_weighted_median():
  values, weights = np.array([5.0, 1.0, 9.0]), np.array([1.0, 1.0, 3.0])
  assert least_absolute.weighted_median(values, weights) == 9.0


# Padded shapes

BUCKETS = Buckets(
  chunk_tokens=(32, 128, 512), decode_requests=(1, 4, 16), transfer_pages=(64,), table_pages=900,
  prefill_rows=(1, 4, 16),
)  # fmt: skip


@pytest.mark.parametrize(
  ("tokens", "batches"),
  [
    ([20], [32]),
    ([20, 30, 31], [4 * 32]),  # three rows take the program of four
    ([20] * 5, [16 * 32]),
    ([100] * 5, [4 * 128, 128]),  # at most 512 tokens in a batch
    ([20, 100], [32, 128]),
    ([1100], [512, 512, 128]),  # pieces of one chunk follow each other
    ([512, 512], [512, 512]),
  ],
)
def test_prefills_are_packed_as_the_executor_packs_them(tokens, batches):
  found = step_shapes.shapes_of([(count, 1000) for count in tokens], BUCKETS)
  assert found.batches == batches
  works = [
    PrefillWork(
      request_id=index, token_ids=slots(count), start=0, samples=True,
      page_table=slots(40) + 40 * index,
    )
    for index, count in enumerate(tokens)
  ]  # fmt: skip
  packed = prefill_batches.pack(works, BUCKETS, page_size=32, device_pages=400)
  rows = [
    batch.padded_tokens
    * smallest_bucket(len(batch.pieces), BUCKETS.batch_rows(batch.padded_tokens))
    for batch in packed
  ]
  assert rows == batches


def test_padded_prefills_cost_their_shapes():
  io = sim.io_config(system("strata"))
  exact, padded = CostModel(BASE, io), CostModel(BASE, io, BUCKETS)
  assert padded.prefill_s([(512, 0)]) == pytest.approx(exact.prefill_s([(512, 0)]))
  weights_s = 2 * BASE.model.layer_params / BASE.hardware.weight_read_bytes_per_s
  apart_s = padded.prefill_s([(20, 0), (100, 0)]) - exact.prefill_s([(20, 0), (100, 0)])
  assert apart_s == pytest.approx(weights_s, rel=0.05)  # two batches read the weights twice
  long = [(512, 90_000)]
  assert padded.prefill_s([(400, 90_000)]) == pytest.approx(padded.prefill_s(long), rel=1e-3)
  assert padded.decode_step_s(3, 100) == exact.decode_step_s(3, 100)


def padded_steps(machine, buckets):
  workload = arrivals.poisson(synthetic.documents(SHAPE), 15.0, 0)
  run = sim.simulate(
    workload, machine, system("strata"), whole_decodes=True, buckets=buckets,
    pools=sim.PoolSizes(device_tokens=60_000, host_tokens=200_000),
  )  # fmt: skip
  return [row._asdict() for row in run.result.steps]


def check_found(found, machine, kept):
  expected = truth(machine, "strata")
  for key, one in found.fitted.items():
    assert one.value == pytest.approx(expected[key], rel=0.02, abs=1e-6), key
  assert set(found.kept) == kept


def test_numbers_are_found_again_through_padded_shapes():
  machine = perturbed(dataclasses.replace(FREE, loads_hold_compute=1.0))
  rows = padded_steps(machine, BUCKETS)
  check_found(fit(rows, "strata", buckets=BUCKETS), machine, {"executor.chunks_apart"})


# Joint passes

JOINT = dataclasses.replace(BUCKETS, joint_tokens=512)


@pytest.mark.parametrize("executor", [FREE, SHARED])
def test_numbers_are_found_again_through_joint_passes(executor):
  machine = perturbed(executor)
  rows = padded_steps(machine, JOINT)
  joint = [row for row in rows if row["joint"]]
  assert sum(row["load_tokens"] > 0 for row in joint) > 5  # of parked requests
  options = {"buckets": JOINT, "decode_shares": executor.decode_shares}
  found = fit(rows, "strata", **options)
  check_found(found, machine, {"executor.chunks_apart"})
  assert found.residuals["joint"].steps > 50
  assert max(one.median_error for one in found.residuals.values()) < 0.005
  # Taken for prefills alone they would make a prefill dear.
  blind = fit([{**row, "joint": False} for row in rows], "strata", **options)
  expected_s = CostModel(machine, sim.io_config(system("strata")), JOINT).prefill_s([(60, 9000)])
  costs = CostModel(blind.profile, sim.io_config(system("strata")), JOINT)
  assert costs.prefill_s([(60, 9000)]) > 1.1 * expected_s


def launched_rows(machine, io, buckets, most_chunks, count=400):
  """Rows of steps launched one by one: of all kinds, with 1 to 4 decode steps."""
  rng = np.random.default_rng(0)
  executor = SimulatedExecutor(CostTimeline(CostModel(machine, io, buckets)))
  for request_id in range(40):
    ids = np.zeros(10_000, np.int32)
    executor.register(request_id, SamplingParams(), ids)
  rows = []
  for step_id in range(count):
    chunks = [
      (int(rng.integers(1, 60)), int(rng.integers(0, 9000)))
      for _ in range(rng.integers(1, most_chunks + 1) if step_id % 3 else 0)
    ]
    if step_id % 9 == 2:
      chunks = [(int(rng.integers(600, 4000)), 0)]  # in passes of its own
    positions = rng.integers(100, 9000, rng.integers(1, 30)) if step_id % 9 != 1 else []
    work = StepWork(
      step_id=step_id, decode_steps=int(rng.integers(1, 5)),
      prefills=tuple(prefill(*chunk) for chunk in chunks),
      decodes=tuple(
        DecodeWork(request_id=1 + i, token_id=0, position=int(at), page_table=slots(1))
        for i, at in enumerate(positions)
      ),
    )  # fmt: skip
    executor.launch(work)
    (done,) = executor.wait(None)
    tokens = [len(done.tokens[decode.request_id]) for decode in work.decodes]
    rows.append({
      "step_id": step_id, "started_s": done.started_s, "ended_s": done.at_s,
      "prefill_end_s": done.prefill_end_s if chunks else done.started_s, "joint": done.joint,
      "prefill_requests": len(chunks), "prefill_chunks": chunks, "parked": 0,
      "decode_requests": len(positions), "decode_steps": max(tokens, default=0),
      "decode_context_tokens": int(sum(positions)), "load_tokens": 0, "load_end_s": None,
      "decode_read_tokens": done.decode_read_tokens, "backup_tokens": 0,
    })  # fmt: skip
  return rows


@pytest.mark.parametrize("known", [True, False])
def test_joint_steps_of_several_decode_steps(known):
  """With the shapes known, and without, where chunks come one by one and are not padded."""
  executor = FREE if known else dataclasses.replace(FREE, chunk_overhead_s=0.0)
  machine, io = perturbed(executor), IoConfig(page_size=16, load_backend="none")
  exact = dataclasses.replace(JOINT, chunk_tokens=tuple(range(1, 4001)), prefill_rows=(1,))
  rows = launched_rows(machine, io, JOINT if known else exact, most_chunks=3 if known else 1)
  assert {row["decode_steps"] for row in rows if row["joint"]} == {1, 2, 3, 4}
  found = calibration.calibrate(
    calibration_steps.read(rows, "x"), BASE, io, buckets=JOINT if known else None
  )
  expected = truth(machine, "strata")
  told = [key for key in found.fitted if key != "executor.step_gap_s"]
  assert "hardware.weight_read_bytes_per_s" in told
  for key in told:
    assert found.fitted[key].value == pytest.approx(expected[key], rel=0.02, abs=1e-6), key
  assert found.residuals["joint"].steps > 50
  assert max(one.median_error for one in found.residuals.values()) < 0.005


@pytest.mark.parametrize("joint_s", [0.0, 4e-3])
def test_what_every_pass_takes_is_not_taken_for_the_cost_of_its_chunks(joint_s):
  executor = dataclasses.replace(FREE, prefill_pass_s=6e-3, joint_pass_s=joint_s)
  machine, io = perturbed(executor), IoConfig(page_size=16, load_backend="none")
  rows = launched_rows(machine, io, JOINT, most_chunks=9)
  found = calibration.calibrate(calibration_steps.read(rows, "x"), BASE, io, buckets=JOINT)
  for field in ("chunk_overhead_s", "prefill_pass_s", "joint_pass_s"):
    got = found.fitted[f"executor.{field}"].value
    assert got == pytest.approx(getattr(executor, field), rel=0.02, abs=1e-5), field
  assert max(one.median_error for one in found.residuals.values()) < 0.005


def test_rows_without_joint_are_those_of_no_joint_step(rows):
  some = rows("strata", FREE)
  assert not any(row["joint"] for row in some)
  old = [{k: v for k, v in row.items() if k != "joint"} for row in some]
  assert fit(old, "strata").fitted == fit(some, "strata").fitted


def test_no_pass_is_joint_without_the_tokens_for_it():
  machine = perturbed(FREE)
  plain, few, joint = (
    padded_steps(machine, dataclasses.replace(BUCKETS, joint_tokens=tokens))
    for tokens in (0, 31, 32)  # the smallest piece has 32
  )
  assert plain == few
  assert not any(row["joint"] for row in plain)
  assert sum(row["joint"] for row in joint) > 5


def test_terms_that_the_number_of_chunks_stands_for_are_not_counted_twice():
  """Chunks that are all alike: their number tells as much as their tokens and their attention."""
  rng = np.random.default_rng(0)
  count = rng.integers(1, 5, 60)
  owner = np.repeat(np.arange(60), count)
  products = 64.0 * rng.normal(20_000, 2_000, len(owner))
  seconds = (10e-3 + 2.5e-3 * count) * rng.normal(1, 0.03, 60)
  passes = calibration_passes._Passes(
    seconds=seconds, count=count.astype(float), backup_s=np.zeros(60), joint=np.zeros(60),
    batch_owner=np.arange(60), tokens=64.0 * count + 10, owner=owner, products=products,
    read=products / 64,
  )  # fmt: skip
  kv_s, weights_s, fixed_s = 1e-9, 1e-6, 10e-3
  for start in ((5e-6, 1e-9), (3e-5, 3e-9)):
    _, one = calibration_passes._fit_pass(passes, fixed_s, weights_s, kv_s, start)
    predicted_s = one.predict(passes, fixed_s, kv_s)
    assert predicted_s.sum() == pytest.approx(seconds.sum(), rel=0.05)
