"""Fits of what loads cost and what they do to the steps beside them.

The arithmetic of `executors.timeline`, for many steps at once: times are seconds since the start of
each step. Loads begin behind those of earlier launches; a prefill waits layer by layer for its own.
"""

from collections.abc import Iterator

import numpy as np

from strata_jax import least_absolute
from strata_jax.calibration_found import Found
from strata_jax.calibration_steps import Steps
from strata_jax.cost_model import CostModel, IoConfig

_MOST_STEPS = 250
_LOADING = 0.7  # a load counts where the compute beside it takes at most this share of its time
_MOST_SLOWDOWN, _MOST_GATE_S = 4.0, 2e-3
_BETTER = 0.98  # how much smaller the loss must be for compute to wait for loads


def predict(steps: Steps, costs: CostModel) -> tuple[np.ndarray, np.ndarray]:
  """Seconds of prefill and of decode with nothing beside them, float64 [steps] both."""
  prefill_s = [costs.prefill_s(chunks) if chunks else 0.0 for chunks in steps.chunks]
  decode_s = [
    count * costs.decode_step_s(int(requests), context / count) if requests and count else 0.0
    for requests, count, context in zip(
      steps.decode_requests, steps.decode_steps, steps.context_tokens, strict=True
    )
  ]
  return np.array(prefill_s), np.array(decode_s)


def fit_loads(found: Found, steps: Steps, io: IoConfig, min_steps: int) -> None:
  """Latency and rate, from loads that compute does not pace."""
  costs = CostModel(found.profile, io)
  seconds, tokens = _pure_loads(steps, costs)
  size_bytes = tokens * costs.token_bytes()
  keys = ("hardware.transfer_latency_s", f"load.{io.load_backend}")
  if len(seconds) < min_steps:
    why = f"only {len(seconds)} of {len(steps.loads.tokens)} launches took longer than the compute"
    for key in keys:
      found.keep(key, why + " beside them")
    return
  varies = size_bytes.std() > 0.01 * size_bytes.mean()
  latency_s = 0.0 if varies else found.profile.hardware.transfer_latency_s
  columns = np.stack([np.full(len(seconds), float(varies)), size_bytes], axis=1)
  fitted_s, byte_s = least_absolute.fit(columns, seconds - latency_s, seconds)
  if varies:
    found.put(keys[0], float(fitted_s), len(seconds))
  else:
    found.keep(keys[0], "all loads were of one size")
  if byte_s <= 0:
    found.keep(keys[1], "larger loads took no longer")
    return
  found.put_load_rate(1.0 / float(byte_s), io, len(seconds))


def fit_beside(found: Found, steps: Steps, io: IoConfig, min_steps: int) -> None:
  """Slowdowns, the cost of a gate, and whether compute waits for loads that it does not read."""
  kind = "copy"
  if io.load_backend in ("kernel", "auto"):
    kind = "kernel" if io.capped_blocks else "kernel_uncapped"
  costs = CostModel(found.profile, io)
  prefill = steps.take(steps.has_loads & steps.has_prefill & ~steps.disturbed).thinned(_MOST_STEPS)
  decode = _decode_beside(steps, costs).thinned(_MOST_STEPS)
  base, usual_gate_s = found.profile.interference[kind], found.profile.hardware.gate_s
  enough_prefill = len(prefill.started_s) >= min_steps
  enough_decode = len(decode.started_s) >= min_steps
  tries = []
  for hold in (False, True):
    losses, gate_s, prefill_slow, decode_slow = [], usual_gate_s, base.prefill, base.decode
    if enough_prefill:
      one = Beside(prefill, costs)
      loss, gate_s, prefill_slow = _search(one, hold, usual_gate_s, base.prefill)
      losses += [loss] * len(prefill.started_s)
    if enough_decode:
      one = Beside(decode, costs)
      error = lambda slow, one=one, hold=hold: (
        _relative(one.decode_s(slow, hold), decode.decode_s) + 1e-6 * abs(slow - base.decode)
      )
      decode_slow, loss = least_absolute.minimize(error, 0.0, _MOST_SLOWDOWN)
      losses += [loss] * len(decode.started_s)
    if losses:
      tries.append((float(np.mean(losses)), float(hold), gate_s, prefill_slow, decode_slow))
  keys = ("hardware.gate_s", f"interference.{kind}.prefill", f"interference.{kind}.decode")
  if not tries:
    for key in (*keys, "executor.loads_hold_compute"):
      found.keep(key, f"fewer than {min_steps} steps beside loads")
    return
  free, held = tries
  _, hold, *values = held if held[0] < _BETTER * free[0] - 1e-6 else free
  found.put("executor.loads_hold_compute", hold, len(prefill.started_s) + len(decode.started_s))
  for key, value, some, enough in (
    (keys[0], values[0], prefill, enough_prefill),
    (keys[1], values[1], prefill, enough_prefill),
    (keys[2], values[2], decode, enough_decode),
  ):
    if enough:
      found.put(key, value, len(some.started_s))
    else:
      found.keep(key, f"only {len(some.started_s)} such steps beside loads")


def residuals(steps: Steps, costs: CostModel) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """Kind, predicted and measured seconds of what `fit_loads` and `fit_beside` look at."""
  profile, hold = costs.profile, bool(costs.profile.executor.loads_hold_compute)
  seconds, tokens = _pure_loads(steps, costs)
  pages = tokens / costs.io.page_size
  yield "loads", np.array([costs.load_s(count) for count in pages]), seconds
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
    self._layer_s = np.array([costs.prefill_layer_s(one) if one else 0.0 for one in steps.chunks])
    self._tail_s = np.array([costs.prefill_tail_s(len(one)) for one in steps.chunks])
    _, self._decode_s = predict(steps, costs)
    share = costs.profile.executor.backups_hold_compute
    self._begin_s = share * _seconds(costs.backup_s, steps.backup_tokens, costs)
    self._own = steps.load_tokens > 0
    self._own_start_s = np.maximum(self._begin_s, steps.busy_s)
    self._own_end_s = self._own_start_s + _seconds(costs.load_s, steps.load_tokens, costs)
    self._busy_until_s = np.where(self._own, self._own_end_s, steps.busy_s)

  @property
  def measured_prefill_s(self) -> np.ndarray:
    return self._steps.prefill_s

  def prefill_s(self, gate_s: float, slowdown: float, hold: bool) -> np.ndarray:
    """Wall time of the prefill parts."""
    steps, own = self._steps, self._own
    waits = own if hold else own & (steps.parked == 0)
    at_s = np.maximum(self._begin_s, steps.busy_s) if hold else self._begin_s
    if self._serial:
      at_s = np.where(own, np.maximum(at_s, self._own_end_s), at_s)
    gated = waits & (self._own_end_s > at_s)
    layer_s = self._layer_s + gate_s * gated
    length_s = self._own_end_s - self._own_start_s
    for layer in range(1, self._layers + 1):
      share = layer / self._layers if self._layerwise else 1.0
      there_s = np.where(gated, self._own_start_s + share * length_s, 0.0)
      at_s = self._advance(np.maximum(at_s, there_s), layer_s, slowdown)
    return self._advance(at_s, self._tail_s, slowdown)

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
    busy_s = self._busy_until_s - start_s
    slowed_s = work_s * (1.0 + slowdown)
    after_s = busy_s + (work_s - busy_s / (1.0 + slowdown))
    spent_s = np.where(slowed_s <= busy_s, slowed_s, after_s)
    return start_s + np.where(busy_s <= 0.0, work_s, spent_s)


def _pure_loads(steps: Steps, costs: CostModel) -> tuple[np.ndarray, np.ndarray]:
  """Seconds on the link and tokens of launches whose compute is short beside the load."""
  loads, executor = steps.loads, costs.profile.executor
  compute_s = np.sum(predict(steps, costs), axis=0)
  backup_s = _seconds(costs.backup_s, steps.backup_tokens, costs)
  alone = loads.step < 0
  at = np.where(alone, 0, loads.step)
  compute_s, backup_s = (np.where(alone, 0.0, values[at]) for values in (compute_s, backup_s))
  # Steps start a gap after the decision; launches without compute are noted as they are decided.
  lag_s = np.where(alone, executor.step_gap_s, executor.backups_hold_compute * backup_s)
  waited_s = np.maximum(loads.after_s - loads.started_s, 0.0)
  seconds = loads.seconds - np.maximum(lag_s - waited_s, 0.0)
  paced = costs.io.overlap == "layer"  # layer by layer a load may have to wait for the compute
  taken = (seconds > 0) & (compute_s <= (_LOADING if paced else np.inf) * seconds)
  return seconds[taken], loads.tokens[taken]


def _decode_beside(steps: Steps, costs: CostModel) -> Steps:
  """Steps whose decode part begins while loads run."""
  own_end_s = steps.busy_s + _seconds(costs.load_s, steps.load_tokens, costs)
  begins_s = np.where(steps.has_prefill, steps.prefill_s, 0.0)
  beside = steps.has_decode & (steps.decode_steps > 0) & (own_end_s > begins_s)
  return steps.take(beside & steps.has_loads & ~steps.disturbed)


def _search(
  steps: Beside, hold: bool, usual_gate_s: float, usual_slowdown: float
) -> tuple[float, float, float]:
  """Loss, gate and slowdown of prefill steps."""
  measured_s = steps.measured_prefill_s

  def at(gate_s: float) -> tuple[float, float]:
    error = lambda slow: (
      _relative(steps.prefill_s(gate_s, slow, hold), measured_s)
      + 1e-6 * (abs(slow - usual_slowdown) + abs(gate_s - usual_gate_s) / _MOST_GATE_S)
    )
    return least_absolute.minimize(error, 0.0, _MOST_SLOWDOWN, grid=9, rounds=20)

  # Gates differ by orders of magnitude: searched by their square root.
  root, loss = least_absolute.minimize(
    lambda root: at(root * root)[1], 0.0, _MOST_GATE_S**0.5, grid=8, rounds=16
  )
  return loss, root * root, at(root * root)[0]


def _relative(predicted: np.ndarray, measured: np.ndarray) -> float:
  return float(np.mean(np.abs(predicted - measured) / np.maximum(measured, 1e-9)))


def _seconds(cost, tokens: np.ndarray, costs: CostModel) -> np.ndarray:
  return np.array([cost(count) for count in tokens / costs.io.page_size])
