"""Profiles of a model on a machine, read from `strata_jax/profiles/*.json`.

A profile `<hardware>_<model>.json` names its hardware file, the number of devices and the shape of
the model. Every number is an object `{"value", "kind", "source"}` (a table has `points` in the
place of `value`) whose kind is `measured`, `published` or `estimated`; the loader refuses a number
without them, and unknown keys.

A hardware file may have a section `executor`: what an executor's steps cost beside the device's
work, fitted by `experiments.calibrate`. Without it, or without one of its keys, that is nothing.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata_jax import validation

FOLDER = pathlib.Path(__file__).resolve().parent / "profiles"
KINDS = ("measured", "published", "estimated")
COPY_BACKENDS = ("memcpy_async", "memcpy_batch", "copy_engine", "device_put")
KERNEL_BLOCKS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateTable:
  """GB/s of a link by the bytes of a fragment."""

  points: tuple[tuple[float, float], ...]  # (fragment bytes, GB/s), by size

  def bytes_per_s(self, fragment_bytes: float) -> float:
    """Interpolated between points on logarithmic scales.

    Below the smallest point a fragment costs what that point's fragment costs; above the largest
    the rate stays.
    """
    points = self.points
    if fragment_bytes <= points[0][0]:
      return points[0][1] * 1e9 * fragment_bytes / points[0][0]
    for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
      if fragment_bytes <= high:
        share = math.log(fragment_bytes / low) / math.log(high / low)
        return 1e9 * low_rate * (high_rate / low_rate) ** share
    return points[-1][1] * 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """One direction between host and device."""

  peak_gbps: float
  kernel: Mapping[int, RateTable]  # by blocks
  copies: Mapping[str, RateTable]  # by back end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interference:
  """How much longer compute takes while a transfer runs, as a share of it."""

  prefill: float
  decode: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """One device of a machine and its host; rates are those of the device."""

  matmul_flops: float
  matmul_efficiency: float
  attention_flops: float
  memory_bytes: float
  memory_fraction: float
  host_memory_bytes: float
  weight_read_bytes_per_s: float
  attention_read_bytes_per_s: float
  copy_bytes_per_s: float
  pass_overhead_s: float
  gate_s: float
  transfer_latency_s: float
  allreduce_bytes_per_s: float
  allreduce_latency_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorCosts:
  """What a real executor adds to the device's work. By default nothing: everything overlaps."""

  step_gap_s: float = 0.0  # host time before a step during which the device idles
  chunk_overhead_s: float = 0.0  # of each chunk of a prefill
  decode_request_s: float = 0.0  # of each request in a decode step
  prefill_pass_s: float = 0.0  # that a pass of prefills takes more than a decode step, at least
  joint_pass_s: float = 0.0  # that decodes in it add to a pass, whatever their number
  chunks_apart: float = 0.0  # 1: each chunk is a pass of its own, which reads the weights
  loads_hold_compute: float = 0.0  # 1: compute waits for every load launched before or with it
  backups_hold_compute: float = 0.0  # share of its backups' time that a step waits for
  decode_shares: int = 1  # rows of a decode step that read what they have in common once

  def __post_init__(self) -> None:
    validation.check_int(self, "decode_shares", minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
  """The store below the host."""

  read_bytes_per_s: float
  write_bytes_per_s: float
  latency_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """What a cost depends on. A mixture of experts has expert fields above 0."""

  num_layers: int
  hidden_size: int
  layer_params: float  # used for every token, in all layers
  head_params: float
  resident_bytes: float  # weights in memory, all devices together
  weight_item_bytes: float
  kv_bytes_token_layer: float  # all devices together
  attention_flops_token_context_layer: float
  expert_params: float = 0.0  # of one expert
  experts: float = 0.0  # of all layers
  experts_per_token: float = 0.0  # of all layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """A model on a machine: what `CostModel` computes seconds from."""

  name: str
  devices: int
  kv_sharded: bool  # whether each device holds 1 / devices of a token's KV
  hardware: Hardware
  load: Link
  backup: Link
  interference: Mapping[str, Interference]  # "kernel", "kernel_uncapped", "copy"
  storage: Storage
  model: ModelShape
  sources: Mapping[str, Mapping[str, Any]]  # {"hardware.gate_s": {"value", "kind", "source"}, ...}
  executor: ExecutorCosts = ExecutorCosts()

  @property
  def kv_bytes_token(self) -> float:
    """KV of a token in all layers, in host memory once (all devices together)."""
    return self.model.kv_bytes_token_layer * self.model.num_layers

  @property
  def device_kv_tokens(self) -> int:
    """Tokens whose KV fits beside the weights into the devices' memory."""
    room = self.hardware.memory_bytes * self.hardware.memory_fraction * self.devices
    copies = 1 if self.kv_sharded else self.devices
    tokens = (room - self.model.resident_bytes) / (self.kv_bytes_token * copies)
    return max(0, int(tokens))

  @property
  def host_kv_tokens(self) -> int:
    return int(self.hardware.host_memory_bytes * self.devices / self.kv_bytes_token)


def names(folder: pathlib.Path | str = FOLDER) -> list[str]:
  """All profiles of the package, or of a folder: HARDWARE_MODEL beside hardware_HARDWARE."""
  stems = [path.stem for path in pathlib.Path(folder).glob("*.json")]
  starts = tuple(f"{s.removeprefix('hardware_')}_" for s in stems if s.startswith("hardware_"))
  return sorted(s for s in stems if s.startswith(starts) and not s.startswith("hardware_"))


def load(name: str, folder: pathlib.Path | str = FOLDER) -> Profile:
  """Reads a profile by name. Raises ValueError with what was expected, naming file and key."""
  folder = pathlib.Path(folder)
  path = folder / f"{name}.json"
  if not path.exists():
    raise ValueError(f"profile: expected one of {', '.join(names(folder))}, got {name!r}")
  profile = json.loads(path.read_text(encoding="utf-8"))
  reader = _Reader(path)
  reader.known(profile, "", {"description", "hardware", "devices", "kv_sharded", "model",
                             "overrides"})  # fmt: skip
  hardware_path = folder / profile["hardware"]
  hardware = json.loads(hardware_path.read_text(encoding="utf-8"))
  links = {"load", "backup", "interference", "storage", "executor", "description"}
  fields = {field.name for field in dataclasses.fields(Hardware)}
  overrides = profile.get("overrides", {})
  reader.known(overrides, "overrides", fields)
  machine = _Reader(hardware_path)
  machine.known(hardware, "", fields | links)
  numbers = {key: overrides.get(key, hardware.get(key)) for key in sorted(fields)}
  executor = hardware.get("executor", {})
  machine.known(executor, "executor", {field.name for field in dataclasses.fields(ExecutorCosts)})
  executor_numbers: dict[str, Any] = {
    key: machine.value(leaf, f"executor.{key}") for key, leaf in executor.items()
  }
  try:
    executor_costs = ExecutorCosts(**executor_numbers)
  except ValueError as error:
    raise ValueError(f"{hardware_path}, executor: {error}") from error
  model_fields = {field.name for field in dataclasses.fields(ModelShape)}
  reader.known(profile["model"], "model", model_fields)
  model: dict[str, Any] = {
    key: reader.value(leaf, f"model.{key}") for key, leaf in profile["model"].items()
  }
  result = Profile(
    name=name,
    devices=int(reader.value(profile["devices"], "devices")),
    kv_sharded=bool(reader.value(profile["kv_sharded"], "kv_sharded")),
    hardware=Hardware(
      **{key: machine.value(leaf, f"hardware.{key}") for key, leaf in numbers.items()}
    ),
    load=_link(machine, hardware["load"], "load"),
    backup=_link(machine, hardware["backup"], "backup"),
    interference={
      kind: Interference(
        **{k: machine.value(leaf, f"interference.{kind}.{k}") for k, leaf in leaves.items()}
      )
      for kind, leaves in hardware["interference"].items()
    },
    storage=Storage(
      **{k: machine.value(leaf, f"storage.{k}") for k, leaf in hardware["storage"].items()}
    ),
    model=ModelShape(**model),
    executor=executor_costs,
    sources={**machine.sources, **reader.sources},
  )
  if result.device_kv_tokens < 1:
    raise ValueError(f"{path}: expected weights to leave room for KV pages in device memory")
  return result


def _link(reader: "_Reader", link: Mapping[str, Any], name: str) -> Link:
  reader.known(link, name, {"peak_gbps", "kernel", *COPY_BACKENDS})
  return Link(
    peak_gbps=reader.value(link["peak_gbps"], f"{name}.peak_gbps"),
    kernel={
      blocks: reader.table(link["kernel"][str(blocks)], f"{name}.kernel.{blocks}")
      for blocks in KERNEL_BLOCKS
    },
    copies={backend: reader.table(link[backend], f"{name}.{backend}") for backend in COPY_BACKENDS},
  )


class _Reader:
  """Takes numbers out of a file and keeps their sources."""

  def __init__(self, path: pathlib.Path) -> None:
    self._path = path
    self.sources: dict[str, Mapping[str, Any]] = {}

  def known(self, found: Mapping[str, Any], where: str, allowed: set[str]) -> None:
    unknown = sorted(set(found) - allowed)
    if unknown:
      raise ValueError(f"{self._path}, {where or 'top level'}: unknown keys {unknown}")

  def value(self, leaf: Any, key: str) -> float:
    self._keep(leaf, key, "value")
    value = leaf["value"]
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
      raise ValueError(f"{self._path}, {key}: expected a number >= 0, got {value!r}")
    return value

  def table(self, leaf: Any, key: str) -> RateTable:
    self._keep(leaf, key, "points")
    points: Sequence[Sequence[float]] = leaf["points"]
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)) or min(min(p) for p in points) <= 0:
      raise ValueError(f"{self._path}, {key}: expected points > 0 by growing size, got {points}")
    return RateTable(points=tuple((float(size), float(rate)) for size, rate in points))

  def _keep(self, leaf: Any, key: str, content: str) -> None:
    if not isinstance(leaf, dict) or set(leaf) != {content, "kind", "source"}:
      raise ValueError(f"{self._path}, {key}: expected {content}, kind and source, got {leaf!r}")
    if leaf["kind"] not in KINDS or not leaf["source"]:
      raise ValueError(f"{self._path}, {key}: expected a kind of {', '.join(KINDS)} and a source")
    self.sources[key] = leaf


def numbers(profile: Profile) -> Iterator[tuple[str, str, str]]:
  """(key, kind, source) of every number, for the tables of a report."""
  for key, leaf in sorted(profile.sources.items()):
    yield key, leaf["kind"], leaf["source"]
