"""Measured runs on file: their points, and all that is needed to serve the same requests again.

A folder of `throughput` has several points, a folder of one run (`serve`, `simulate`) has one.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import run_files, synthetic_flags, throughput_plan
from experiments.synthetic_flags import ShapeConfig
from strata_jax import simulation
from strata_jax.config import MODELS, ServingConfig
from strata_jax.executors.buckets import Buckets, make_buckets
from strata_jax.profile import Profile
from strata_jax.scheduler.views import Costs
from strata_jax.simulation import PoolSizes, SimulatedRun
from strata_jax.systems import SystemConfig
from strata_jax.workloads import arrivals
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload, output_tokens

Row = run_files.Row
SHAPES = {"piece_tokens": 1, "prefill_rows": 1, "row_factor": 2, "joint_tokens": 0}
"""What the shapes of a run depend on (fields of `ExecutorConfig`), and the least they can be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
  """One system at one rate, once."""

  point_id: int
  label: str  # of the system
  system: SystemConfig
  policy: str | None  # in the place of the system's: a name, FILE.py:NAME or module:NAME
  rate_rps: float
  repeat: int
  row: Row  # of `points.jsonl`: names, sizes and the summary

  def __str__(self) -> str:
    return f"{self.label} at {self.rate_rps:g} requests/s, repeat {self.repeat}"


class MeasuredRun:
  """A folder of `throughput`."""

  def __init__(self, folder: str | pathlib.Path) -> None:
    """Reads everything but the rows of requests and steps.

    Raises:
      OSError: a file is not there.
      ValueError: names the file and the field that is not as expected.
    """
    self.path = pathlib.Path(folder)
    self._config_path = self.path / "config.json"
    self._config = run_files.read_json(self._config_path)
    self._bench = run_files.need(self._config, self._config_path, "config", "bench")
    path = self.path / "points.jsonl"
    self.points = [_point(row, path, index) for index, row in enumerate(run_files.read_rows(path))]
    if not self.points:
      raise ValueError(f"{path}: expected points, got none")
    model = run_files.need(self._bench, self._config_path, "model", "name", prefix="config.bench")
    self.model = str(model)
    self.initial_cache = str(self._of_bench("initial_cache"))
    try:
      self.serving = ServingConfig(**self._of_bench("serving"))
    except TypeError as error:
      raise ValueError(f"{self._config_path}, config.bench.serving: {error}") from error

  def source(self, point: MeasuredPoint) -> str:
    """The run, its device and its commit, for what is taken from a point."""
    commands = run_files.need(self._config, self._config_path, "commands")
    command = commands[min(point.row.get("command", 0), len(commands) - 1)]
    return f"{self.path}, {command.get('device_kind')}, commit {command.get('git_sha')}"

  def chosen(
    self, *, point: int | None = None, system: str | None = None, rate: float | None = None
  ) -> list[MeasuredPoint]:
    """The point with an id, or all repeats of a system at a rate.

    Raises:
      ValueError: there is none, or they are not of one system and rate.
    """
    self.check_systems("system", () if system is None else (system,))
    found = [
      one for one in self.points
      if (point is None or one.point_id == point) and (system is None or one.label == system)
      and (rate is None or math.isclose(one.rate_rps, rate, rel_tol=1e-9))
    ]  # fmt: skip
    if len({(one.label, one.rate_rps) for one in found}) == 1:
      return found
    known = "; ".join(f"{one.point_id}: {one}" for one in self.points)
    raise ValueError(
      f"{self.path}: expected points of one system and rate for --point={point} "
      f"--system={system} --rate={rate}, got {len(found)} of {known}"
    )

  @property
  def labels(self) -> list[str]:
    """Of its systems."""
    return list(dict.fromkeys(point.label for point in self.points))

  @functools.cached_property
  def left_out(self) -> dict[str, str]:
    """By label: why its points cannot be served again, where their policy's text is not there."""
    found: dict[str, str] = {}
    for point in self.points:
      if point.policy is None:
        continue
      why = f"the text of {point.policy} is not the one that served them"
      try:
        if throughput_plan.policy_digest(point.policy) == point.row.get("policy_digest"):
          continue
      except ValueError as error:
        why = " ".join(str(error).split())
      found[point.label] = f"left out, the points of {point.label}: {why}"
    return found

  @property
  def servable(self) -> list[MeasuredPoint]:
    """All points but those left out. Raises ValueError where none is left."""
    found = [point for point in self.points if point.label not in self.left_out]
    if not found:
      raise ValueError("; ".join(self.left_out.values()))
    return found

  def check_systems(self, flag: str, labels: Iterable[str]) -> None:
    """Raises ValueError that names the flag for a system that the run does not have."""
    for label in labels:
      if label not in self.labels:
        raise ValueError(f"--{flag}: expected one of {', '.join(self.labels)}, got {label!r}")

  def steps(self, point: MeasuredPoint) -> list[Row]:
    """The rows of its steps."""
    return self._rows("steps", point)

  def requests(self, point: MeasuredPoint) -> list[Row]:
    """The rows of its requests."""
    return self._rows("requests", point)

  def pools(self, point: MeasuredPoint) -> PoolSizes:
    """The sizes of its tiers."""
    path = self.path / "points.jsonl"
    return PoolSizes(
      device_tokens=run_files.need(point.row, path, "device_tokens"),
      host_tokens=run_files.need(point.row, path, "host_tokens"),
    )

  def shapes(self) -> dict[str, int]:
    """What its executor was told of its shapes: `SHAPES`.

    Raises:
      ValueError: the folder does not say how its executor was made.
    """
    executor = {"joint_tokens": 0, **self._of_bench("executor")}  # older runs have none
    of = lambda field: run_files.need(
      executor, self._config_path, field, prefix="config.bench.executor"
    )
    return {name: of(name) for name in SHAPES}

  def buckets(self, point: MeasuredPoint, **shapes: int) -> Buckets:
    """The shapes that its executor padded to, as `executor_flags.make` chooses them.

    Args:
      point: of the run.
      **shapes: some of `SHAPES`, in the place of the run's.

    Raises:
      ValueError: the folder does not say how its executor was made, or a shape cannot be.
    """
    if self.model not in MODELS:
      raise ValueError(f"{self._config_path}: expected a known model, got {self.model!r}")
    requests = self._plain_workload.requests
    page_size = point.system.page_size
    return make_buckets(
      MODELS[self.model].page_layout(page_size), self.serving,
      device_pages=self.pools(point).device_tokens // page_size,
      context_tokens=max(len(r.prompt_ids) + output_tokens(r) for r in requests),
      **self.shapes() | shapes,
    )  # fmt: skip

  def decode_shares(self, point: MeasuredPoint) -> int:
    """Rows of its decode steps that read what they had in common once; runs that say none: 1."""
    found = point.row.get("decode_shares", 1)
    if type(found) is not int or found < 1:
      path = self.path / "points.jsonl"
      raise ValueError(f"{path}: expected decode_shares to be an integer >= 1, got {found!r}")
    return found

  def other_model(self, profile: Profile) -> str | None:
    """A warning where the profile's model has other shapes than the one that was served."""
    served, costed = MODELS.get(self.model), profile.model
    if served is None or (served.num_layers, served.hidden_size) == (
      costed.num_layers, costed.hidden_size
    ):  # fmt: skip
      return None
    return (
      f"warning: {self.path} served {self.model} ({served.num_layers} layers of"
      f" {served.hidden_size}), {profile.name} has {costed.num_layers} layers of"
      f" {costed.hidden_size}: times of one mean nothing for the other"
    )

  def machine(self, point: MeasuredPoint, profile: Profile) -> Profile:
    """The profile with what is the run's: how many rows its executor let read together."""
    executor = dataclasses.replace(profile.executor, decode_shares=self.decode_shares(point))
    return dataclasses.replace(profile, executor=executor)

  @property
  def seed(self) -> int:
    """Of its arrivals in repeat 0."""
    return self._of_bench("seed")

  @property
  def point_limit_s(self) -> float:
    """When a point ends: who is not served by then has given up. Infinite without a limit."""
    return self._of_bench("point_limit_s") or math.inf

  def shown_costs(self, point: MeasuredPoint) -> Costs | None:
    """What its policy was shown; None: it is not on file."""
    found = point.row.get("costs")
    return None if found is None else Costs(**found)

  def workload(self, point: MeasuredPoint) -> Workload:
    """Its requests again, outputs forced to the lengths that came; checked against its rows.

    Token ids are not those of the run; they are shared and distinct where its own were.

    Raises:
      ValueError: they are not the requests of the rows.
    """
    found = self.arriving(point.rate_rps, self.seed + point.repeat)
    path, rows = self.path / "requests.jsonl.gz", self.requests(point)
    if len(rows) != len(found.requests):
      raise ValueError(
        f"{path}, point {point.point_id}: expected {len(found.requests)} requests, got {len(rows)}"
      )
    for index, (request, row) in enumerate(zip(found.requests, rows, strict=True)):
      _check(request, row, f"{path}, point {point.point_id}, request {index}")
    return found

  def arriving(self, rate_rps: float | None, seed: int, *, shuffle: bool = False) -> Workload:
    """Its requests at a rate, given up when a point of the run ends.

    Args:
      rate_rps: None: in a closed loop.
      seed: of the arrival times.
      shuffle: whether they come in another order, drawn by the seed as well.

    Raises:
      ValueError: requests that follow others have no other order.
    """
    plain, limit_s = self._plain_workload, self.point_limit_s
    if shuffle:
      plain = _shuffled(plain, seed)
    found = (
      arrivals.poisson(plain, rate_rps, seed) if rate_rps is not None else arrivals.closed(plain)
    )
    if math.isinf(limit_s):
      return found
    return found.with_requests(
      dataclasses.replace(one, abort_s=max(0.0, limit_s - (one.arrival_s or 0.0)))
      for one in found.requests
    )

  def simulate(
    self,
    point: MeasuredPoint,
    machine: Profile,
    workload: Workload,
    *,
    system: SystemConfig | None = None,
    buckets: Buckets | None = None,
    policy: str | None = None,
  ) -> SimulatedRun:
    """Serves requests as the point's were, in the simulation.

    Args:
      point: gives the pools, the shown costs and how many rows read together.
      machine: the profile.
      workload: the requests.
      system: in the place of the point's.
      buckets: in the place of its shapes.
      policy: in the place of the point's: a name, FILE.py:NAME or module:NAME.

    Raises:
      OSError, ValueError: files that say too little.
    """
    system = system or point.system
    return simulation.simulate(
      workload, self.machine(point, machine), system, serving=self.serving,
      pools=self.pools(point), initial_cache=self.initial_cache if system.host else "cold",
      shown_costs=self.shown_costs(point), whole_decodes=True,
      buckets=buckets or self.buckets(point), policy=policy or point.policy,
    )  # fmt: skip

  @functools.cached_property
  def _plain_workload(self) -> Workload:
    config = run_files.need(self._config, self._config_path, "config")
    name = run_files.need(config, self._config_path, "workload", prefix="config")
    shape = run_files.need(config, self._config_path, "shape", prefix="config")
    return synthetic_flags.generate(name, ShapeConfig(**shape), self._of_bench("seed"))

  def _of_bench(self, field: str) -> Any:
    return run_files.need(self._bench, self._config_path, field, prefix="config.bench")

  @functools.cached_property
  def _by_point(self) -> dict[str, dict[int, list[Row]]]:
    found: dict[str, dict[int, list[Row]]] = {}
    for name in ("steps", "requests"):
      path = self.path / f"{name}.jsonl.gz"
      rows: dict[int, list[Row]] = {}
      for row in run_files.read_rows(path):
        rows.setdefault(run_files.need(row, path, "point"), []).append(row)
      found[name] = rows
    return found

  def _rows(self, name: str, point: MeasuredPoint) -> list[Row]:
    rows = self._by_point[name].get(point.point_id)
    if rows is None:
      raise ValueError(
        f"{self.path / f'{name}.jsonl.gz'}: expected rows of point {point.point_id}, got none"
      )
    return rows


def _shuffled(workload: Workload, seed: int) -> Workload:
  requests = workload.requests
  if any(request.follows is not None for request in requests):
    raise ValueError("--shuffle: expected requests that do not follow others")
  order = np.random.default_rng(seed).permutation(len(requests))
  return workload.with_requests(
    dataclasses.replace(requests[old], request_id=requests[new].request_id)
    for new, old in enumerate(order)
  )


def is_points_folder(folder: str | pathlib.Path) -> bool:
  """Whether it has points of `throughput`."""
  return (pathlib.Path(folder) / "points.jsonl").exists()


def _point(row: Row, path: pathlib.Path, index: int) -> MeasuredPoint:
  label = run_files.need(row, path, "system")
  contender = throughput_plan.contender_of(label, row.get("policy"))
  return MeasuredPoint(
    point_id=row.get("order", index),
    label=label,
    system=contender.system,
    policy=contender.policy,
    rate_rps=float(run_files.need(row, path, "rate_rps")),
    repeat=int(run_files.need(row, path, "repeat")),
    row=row,
  )


def _check(request: Request, row: Row, where: str) -> None:
  wanted: Sequence[tuple[str, float]] = (
    ("request_id", request.request_id), ("prompt_tokens", len(request.prompt_ids)),
    ("arrival_s", request.arrival_s or 0.0),
  )  # fmt: skip
  for field, value in wanted:
    got = row.get(field)
    if got is None or not math.isclose(got, value, rel_tol=1e-9, abs_tol=1e-9):
      raise ValueError(f"{where}: expected {field} {value}, got {got}")
  outputs = request.forced_output_ids
  assert outputs is not None
  if row.get("outcome") == "finished" and row.get("output_tokens") != len(outputs):
    raise ValueError(
      f"{where}: expected output_tokens {len(outputs)}, got {row.get('output_tokens')}"
    )
