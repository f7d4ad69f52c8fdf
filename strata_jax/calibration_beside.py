"""Fits of what loads cost and what they do to the steps beside them.

The arithmetic of `executors.timeline`, for many steps at once: times are seconds since the start of
each step. Loads begin behind those of earlier launches; a prefill waits layer by layer for its own.
A joint pass is a prefill that takes longer by what its decodes add.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from strata_jax import least_absolute
from strata_jax.calibration_found import Found
from strata_jax.calibration_steps import Steps
from strata_jax.cost_model import CostModel

_MOST_STEPS = 250
_LOADING = 0.7  # a load counts where the compute beside it takes at most this share of its time
_LOADS = 8  # so many of them are enough
_MOST_SLOWDOWN, _MOST_GATE_S = 4.0, 2e-3
_TOLD = 1e-4  # by how much an error must grow with another value
_BETTER = 0.98  # how much smaller the loss must be for compute to wait for loads


def predict(steps: Steps, costs: CostModel) -> tuple[np.ndarray, np.ndarray]:
  """Seconds of prefill and of decode with nothing beside them, float64 [steps] both.

  Of a joint step the pass up to the prefills' tokens, and what comes after it.
  """
  prefill_s = [
    costs.prefill_s(chunks, *joint) if chunks else 0.0
    for chunks, joint in zip(steps.chunks, _joint(steps), strict=True)
  ]
  decode_s = [
    count * costs.decode_step_s(int(requests), read / count) if requests and count else 0.0
    for requests, count, read in zip(
      steps.decode_requests, steps.decode_steps, steps.read_tokens, strict=True
    )
  ]
  for index, (requests, read) in enumerate(_joint(steps)):
    if requests:
      decode_s[index] += costs.head_s(requests) - costs.decode_step_s(requests, read)
  return np.array(prefill_s), np.array(decode_s)


def _joint(steps: Steps) -> list[tuple[int, float]]:
  """Requests of the decode step that is in one pass with the prefill, and what it reads."""
  return [
    (int(requests), float(read)) if joint else (0, 0.0)
    for joint, requests, read in zip(
      steps.joint, steps.decode_requests, steps.first_read_tokens, strict=True
    )
  ]


def fit_loads(found: Found, steps: Steps, costs: CostModel, min_steps: int) -> None:
  """Latency and rate, from loads that compute does not pace; `costs` are of what was found yet."""
  io = costs.io
  measured_s, tokens = _pure_loads(steps, costs)
  size_bytes = tokens * costs.token_bytes()
  keys = ("hardware.transfer_latency_s", f"load.{io.load_backend}")
  if len(measured_s) < min(min_steps, _LOADS):
    why = (
      f"only {len(measured_s)} of {len(steps.loads.tokens)} launches took longer than the compute"
    )
    for key in keys:
      found.keep(key, why + " beside them")
    return
  varies = size_bytes.std() > 0.01 * size_bytes.mean()
  latency_s = 0.0 if varies else found.profile.hardware.transfer_latency_s
  columns = np.stack([np.full(len(measured_s), float(varies)), size_bytes], axis=1)
  fitted_s, byte_s = least_absolute.fit(columns, measured_s, latency_s)
  if varies:
    found.put(keys[0], float(fitted_s), len(measured_s))
  else:
    found.keep(keys[0], "all loads were of one size")
  if byte_s <= 0:
    found.keep(keys[1], "larger loads took no longer")
    return
  found.put_load_rate(1.0 / float(byte_s), io, len(measured_s))


def fit_beside(found: Found, steps: Steps, costs: CostModel, min_steps: int) -> None:
  """Slowdowns, the cost of a gate, and whether compute waits for loads that it does not read."""
  kind = "copy"
  if costs.io.load_backend in ("kernel", "auto"):
    kind = "kernel" if costs.io.capped_blocks else "kernel_uncapped"
  prefill = steps.take(steps.has_loads & steps.has_prefill & ~steps.disturbed).thinned(_MOST_STEPS)
  decode = _decode_beside(steps, costs).thinned(_MOST_STEPS)
  base, usual_gate_s = found.profile.interference[kind], found.profile.hardware.gate_s
  keys = ("hardware.gate_s", f"interference.{kind}.prefill", f"interference.{kind}.decode")
  usual = (usual_gate_s, base.prefill, base.decode)
  counts = (len(prefill.started_s), len(prefill.started_s), len(decode.started_s))
  tries = [_try(prefill, decode, costs, usual, min_steps, hold=hold) for hold in (False, True)]
  free, held = tries
  if free.loss is None or held.loss is None:
    found.keep("executor.loads_hold_compute", f"fewer than {min_steps} steps beside loads")
  else:
    chosen = held if held.loss < _BETTER * free.loss - 1e-6 else free
    found.put("executor.loads_hold_compute", float(chosen is held), counts[0] + counts[2])
    free = chosen
  for key, count, value, told in zip(keys, counts, free.values, free.told, strict=True):
    if count < min_steps:
      found.keep(key, f"only {count} such steps beside loads")
    elif not told:
      found.keep(key, f"the times of {count} steps beside loads do not depend on it")
    else:
      found.put(key, value, count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Try:
  """A fit of gate, slowdown of prefill and of decode, and whether the steps tell them."""

  loss: float | None
  values: tuple[float, float, float]
  told: tuple[bool, bool, bool]


def _try(
  prefill: Steps, decode: Steps, costs: CostModel, usual: tuple[float, float, float],
  min_steps: int, *, hold: bool,
) -> _Try:  # fmt: skip
  gate_s, prefill_slow, decode_slow = usual
  losses: list[float] = []
  told = [False, False, False]
  if len(prefill.started_s) >= min_steps:
    one = Beside(prefill, costs)
    at = lambda gate_s, slow: _relative(one.prefill_s(gate_s, slow, hold), prefill.prefill_s)
    gate_s, prefill_slow = _search(at, usual[0], usual[1])
    loss = at(gate_s, prefill_slow)
    told[0] = _is_told(lambda x: at(x, prefill_slow), gate_s, usual[0], 1e-5, loss)
    told[1] = _is_told(lambda x: at(gate_s, x), prefill_slow, usual[1], 0.05, loss)
    losses += [loss] * len(prefill.started_s)
  if len(decode.started_s) >= min_steps:
    two = Beside(decode, costs)
    error = lambda slow: _relative(two.decode_s(slow, hold), decode.decode_s)
    near = lambda slow: error(slow) + 1e-6 * abs(slow - usual[2])
    decode_slow, _ = least_absolute.minimize(near, 0.0, _MOST_SLOWDOWN)
    loss = error(decode_slow)
    told[2] = _is_told(error, decode_slow, usual[2], 0.05, loss)
    losses += [loss] * len(decode.started_s)
  return _Try(
    loss=float(np.mean(losses)) if losses else None,
    values=(gate_s, prefill_slow, decode_slow), told=(told[0], told[1], told[2]),
  )  # fmt: skip


def _is_told(
  error: Callable[[float], float], value: float, usual: float, step: float, loss: float
) -> bool:
  """Whether another value would be worse."""
  return max(error(usual), error(1.5 * value + step)) - loss > _TOLD


def residuals(steps: Steps, costs: CostModel) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """Kind, predicted and measured seconds of what `fit_loads` and `fit_beside` look at."""
  profile, hold = costs.profile, bool(costs.profile.executor.loads_hold_compute)
  measured_s, tokens = _pure_loads(steps, costs)
  yield "loads", seconds(costs.load_s, tokens, costs), measured_s
  prefill = steps.take(steps.has_loads & steps.has_prefill & ~steps.disturbed)
  slow = costs.interference
  predicted = Beside(prefill, costs).prefill_s(profile.hardware.gate_s, slow.prefill, hold)
  yield "prefill beside loads", predicted, prefill.prefill_s
  decode = _decode_beside(steps, costs)
  yield "decode beside loads", Beside(decode, costs).decode_s(slow.decode, hold), decode.decode_s


class Beside:
  """Steps beside loads: what `CostTimeline` says of them, by what is to be fitted."""

  def __init__(self, steps: Steps, costs: CostModel) -> None:
    self._steps = steps
    self._layers = costs.layers
    self._layerwise = costs.io.overlap == "layer"
    self._serial = costs.io.overlap == "none"
    self._layer_s = np.array(
      [
        costs.prefill_layer_s(chunks, *joint) if chunks else 0.0
        for chunks, joint in zip(steps.chunks, _joint(steps), strict=True)
      ]
    )
    self._tail_s = np.array([costs.prefill_tail_s(len(one)) for one in steps.chunks])
    _, self._decode_s = predict(steps, costs)
    self._begin_s = seconds(costs.backup_hold_s, steps.backup_tokens, costs)
    self._own = steps.load_tokens > 0
    self._own_start_s = np.maximum(self._begin_s, steps.busy_s)
    self._own_end_s = self._own_start_s + seconds(costs.load_s, steps.load_tokens, costs)
    self._starts: dict[bool, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    self._busy_until_s = np.where(self._own, self._own_end_s, steps.busy_s)

  def prefill_s(self, gate_s: float, slowdown: float, hold: bool) -> np.ndarray:
    """Wall time of the prefill parts."""
    if hold not in self._starts:
      self._starts[hold] = self._start(hold)
    at_s, gated, there_s = self._starts[hold]
    layer_s = self._layer_s + gate_s * gated
    for ready_s in there_s:
      at_s = self._advance(np.maximum(at_s, ready_s), layer_s, slowdown)
    return self._advance(at_s, self._tail_s, slowdown)

  def _start(self, hold: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When prefills may begin, which wait for loads, and when these are there [layers, steps]."""
    steps, own = self._steps, self._own
    waits = own if hold else own & (steps.parked == 0)
    at_s = np.maximum(self._begin_s, steps.busy_s) if hold else self._begin_s
    if self._serial:
      at_s = np.where(own, np.maximum(at_s, self._own_end_s), at_s)
    gated = waits & (self._own_end_s > at_s)
    shares = np.arange(1, self._layers + 1)[:, None] / self._layers
    if not self._layerwise:
      shares = np.ones_like(shares)
    length_s = self._own_end_s - self._own_start_s
    there_s = np.where(gated, self._own_start_s + shares * length_s, 0.0)
    return at_s, gated, there_s

  def decode_s(self, slowdown: float, hold: bool) -> np.ndarray:
    """Wall time of the decode parts."""
    steps, own = self._steps, self._own
    alone = ~steps.has_prefill
    begin_s = np.where(alone, self._begin_s, steps.prefill_s)
    at_s = begin_s
    if hold:
      until_s = steps.busy_s
      if not self._layerwise:
        until_s = np.where(own, self._own_end_s, until_s)
      at_s = np.where(alone, np.maximum(at_s, until_s), at_s)
    first_s = self._decode_s / np.maximum(steps.decode_steps, 1)
    end_s = self._advance(at_s, first_s, slowdown)
    if hold and self._layerwise:
      end_s = np.where(alone & own, np.maximum(end_s, self._own_end_s), end_s)
    end_s = self._advance(end_s, self._decode_s - first_s, slowdown)
    return end_s - np.where(alone, 0.0, steps.prefill_s)

  def _advance(self, start_s: np.ndarray, work_s: np.ndarray, slowdown: float) -> np.ndarray:
    busy_s = np.maximum(self._busy_until_s - start_s, 0.0)
    slowed_s = np.minimum(slowdown * work_s, (slowdown / (1.0 + slowdown)) * busy_s)
    return start_s + work_s + slowed_s


def _pure_loads(steps: Steps, costs: CostModel) -> tuple[np.ndarray, np.ndarray]:
  """Seconds on the link and tokens of launches whose compute is short beside the load."""
  loads, executor = steps.loads, costs.profile.executor
  compute_s = np.sum(predict(steps, costs), axis=0)
  held_s = seconds(costs.backup_hold_s, steps.backup_tokens, costs)
  alone = loads.step < 0
  at = np.where(alone, 0, loads.step)
  compute_s, held_s = (np.where(alone, 0.0, values[at]) for values in (compute_s, held_s))
  # Steps start a gap after the decision; launches without compute are noted as they are decided.
  lag_s = np.where(alone, executor.step_gap_s, held_s)
  waited_s = np.maximum(loads.after_s - loads.started_s, 0.0)
  loading_s = loads.seconds - np.maximum(lag_s - waited_s, 0.0)
  paced = costs.io.overlap == "layer"  # layer by layer a load may have to wait for the compute
  taken = (loading_s > 0) & (compute_s <= (_LOADING if paced else np.inf) * loading_s)
  return loading_s[taken], loads.tokens[taken]


def _decode_beside(steps: Steps, costs: CostModel) -> Steps:
  """Steps whose decode part begins while loads run; not those that begin with the prefill."""
  own_end_s = steps.busy_s + seconds(costs.load_s, steps.load_tokens, costs)
  begins_s = np.where(steps.has_prefill, steps.prefill_s, 0.0)
  beside = steps.has_decode & (steps.decode_steps > 0) & (own_end_s > begins_s)
  return steps.take(beside & steps.has_loads & ~steps.disturbed & ~steps.joint)


def _search(
  error: Callable[[float, float], float], usual_gate_s: float, usual_slowdown: float
) -> tuple[float, float]:
  """The gate and the slowdown with the smallest error; the usual ones where it is the same."""

  def at(gate_s: float) -> tuple[float, float]:
    near = lambda slow: (
      error(gate_s, slow)
      + 1e-6 * (abs(slow - usual_slowdown) + abs(gate_s - usual_gate_s) / _MOST_GATE_S)
    )
    return least_absolute.minimize(near, 0.0, _MOST_SLOWDOWN, grid=9, rounds=20)

  # Gates differ by orders of magnitude: searched by their square root.
  root, _ = least_absolute.minimize(
    lambda root: at(root * root)[1], 0.0, _MOST_GATE_S**0.5, grid=8, rounds=16
  )
  return root * root, at(root * root)[0]


def _relative(predicted: np.ndarray, measured: np.ndarray) -> float:
  return float(np.mean(least_absolute.errors(predicted, measured)))


def seconds(cost: Callable[[int], float], tokens: np.ndarray, costs: CostModel) -> np.ndarray:
  """The cost of so many pages, for tokens float64 [steps]."""
  return np.array([cost(count) for count in tokens / costs.io.page_size])
