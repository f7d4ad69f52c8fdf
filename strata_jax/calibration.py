"""Fits a profile to the steps that an executor took: what `CostModel` would have to cost.

Steps without loads beside give decode (a base, a request, a token whose KV is read) and prefill (a
pass, a chunk, a token, attention); a joint step gives its pass, less what its decodes add to it.
Launches with loads give latency and rate; steps beside loads give the slowdown, the cost of a gate,
and whether compute waits for loads it does not read (`calibration_beside`). Errors are relative and
absolute: a few odd steps do not bend a fit; that they take longer is spread over all (a factor of
decode steps, seconds a prefill chunk). What the steps do not tell keeps the base profile's number.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from strata_jax import calibration_beside as beside
from strata_jax import least_absolute
from strata_jax.calibration_found import Fitted, Found
from strata_jax.calibration_passes import TELLING_STEPS, DecodeFit, clipped, fit_prefill
from strata_jax.calibration_steps import Steps
from strata_jax.cost_model import CostModel, IoConfig
from strata_jax.executors.buckets import Buckets
from strata_jax.profile import Profile

_MOST_STEPS = 1500  # of a kind that a fit looks at
_SHORTEST_S = 1e-6  # of a decode step, whatever its requests: less makes no sense


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
  """How well the fitted profile tells the times it was fitted to."""

  steps: int
  median_error: float  # median of |predicted - measured| / measured
  bias: float  # sum of predicted over sum of measured, minus 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
  """A fitted profile."""

  profile: Profile
  fitted: dict[str, Fitted]  # by key of the profile
  kept: dict[str, str]  # key of the profile: why it keeps the base's number
  residuals: dict[str, Residual]  # by kind of step


def calibrate(
  steps: Steps,
  base: Profile,
  io: IoConfig,
  *,
  buckets: Buckets | None = None,
  decode_shares: int = 1,
  min_steps: int = 20,
) -> Calibration:
  """Fits `base` to steps of one system.

  Args:
    steps: of one run.
    base: where numbers come from that steps do not tell; one device, no experts.
    io: how the system moved pages.
    buckets: shapes that the executor padded prefills to; None: not known.
    decode_shares: as in `ExecutorCosts`: what the run says, nothing to fit.
    min_steps: of each kind that is needed.

  Raises:
    ValueError: another kind of profile, too few steps of a kind, decode steps that take nothing
      beside their requests and contexts, or that share reads though nothing is to be shared.
  """
  if base.devices != 1 or base.model.experts:
    raise ValueError(
      f"base profile: expected one device and a dense model, got {base.name} with {base.devices} "
      f"device(s) and {base.model.experts:g} experts"
    )
  if min_steps < 1:
    raise ValueError(f"min_steps: expected an integer >= 1, got {min_steps}")
  quiet = steps.take(~steps.has_loads & ~steps.disturbed)
  decode = quiet.take(quiet.has_decode & (quiet.decode_steps > 0) & ~quiet.joint)
  prefill = quiet.take(quiet.has_prefill)
  loads_wanted = io.load_backend != "none" and not io.load_is_free
  for kind, count in (
    ("decode steps without loads beside them", len(decode.started_s)),
    ("prefill steps without loads beside them", len(prefill.started_s)),
    *((("launches with loads", len(steps.loads.tokens)),) if loads_wanted else ()),
  ):
    if count < min_steps:
      raise ValueError(f"min_steps: expected at least {min_steps} {kind}, got {count}")
  sharing = int((steps.read_tokens < steps.context_tokens).sum())
  if sharing and decode_shares == 1:
    raise ValueError(
      f"decode_shares: expected more than 1, as {sharing} steps read fewer tokens than they attend "
      "to, got 1"
    )
  costs = CostModel(base, io, buckets)
  token_s = costs.token_bytes() / costs.backup_rate if costs.backup_rate else 0.0
  backup_s = lambda some: token_s * some.backup_tokens
  fewer = prefill.thinned(_MOST_STEPS)

  def compute(hold: float | None) -> Found:
    """Fits of compute; `hold` is the share of their backups that steps wait for, if known."""
    found = Found(base)
    found.note("executor.decode_shares", decode_shares)
    _fit_gap(found, steps)
    known = lambda some: some if hold is None else _without_backups(some, hold * backup_s(some))
    free_s = lambda some: backup_s(some) * (hold is None)
    step = _fit_decode(found, known(decode), free_s(decode))
    if step.base_s < _SHORTEST_S:
      raise ValueError(
        f"expected decode steps that tell what one takes whatever its requests, got "
        f"{step.base_s:g} s of {len(decode.started_s)}"
      )
    fit_prefill(found, known(fewer), free_s(fewer), step, buckets)
    return found

  found = compute(None)
  model = lambda: CostModel(found.profile, io, buckets)
  key = "executor.backups_hold_compute"
  hold = _fit_backups(quiet, model(), backup_s(quiet))
  if isinstance(hold, str):
    found.keep(key, hold)
  else:
    found = compute(hold.value)  # what backups take may not stand for anything else
    found.put(key, hold.value, hold.steps)
  if loads_wanted:
    beside.fit_loads(found, steps, model(), min_steps)
    beside.fit_beside(found, steps, model(), min_steps)
  return Calibration(
    profile=found.profile,
    fitted=found.fitted,
    kept=found.kept,
    residuals=_residuals(steps, decode, prefill, model(), loads_wanted),
  )


def _fit_gap(found: Found, steps: Steps) -> None:
  """The mean host gap, without the few times that the host was held up for long."""
  gaps = steps.gap_s[np.isfinite(steps.gap_s)]
  if not len(gaps):
    found.keep("executor.step_gap_s", "no step followed another at once")
    return
  usual = gaps[gaps <= max(10 * float(np.median(gaps)), 1e-6)]
  found.put("executor.step_gap_s", max(0.0, float(usual.mean())), len(usual))


def _fit_decode(found: Found, decode: Steps, backup_s: np.ndarray) -> DecodeFit:
  count, requests = decode.decode_steps, decode.decode_requests
  varies = requests.std() > 0.01 * requests.mean()
  only = np.where(decode.has_prefill, 0.0, backup_s)
  features = np.stack(
    [count, count * requests * varies, decode.read_tokens, only], axis=1
  )  # [steps, terms]
  fitted = least_absolute.fit(features, decode.decode_s)
  # Slow steps do not bend the fit, but what they take longer is time all the same.
  predicted_s = features @ fitted
  longer = clipped(decode.decode_s, predicted_s).sum() / max(predicted_s.sum(), 1e-12)
  base_s, request_s, read_s = (longer * fitted[:3]).tolist()
  steps, model = len(count), found.profile.model
  if varies:
    found.put("executor.decode_request_s", request_s, steps)
  else:
    found.keep("executor.decode_request_s", "all decode steps had as many requests")
  if read_s * decode.read_tokens.sum() > 0.01 * decode.decode_s.sum():
    rate = model.num_layers * model.kv_bytes_token_layer / read_s
    found.put("hardware.attention_read_bytes_per_s", rate, steps)
  else:
    found.keep("hardware.attention_read_bytes_per_s", "contexts make up under 1 % of decode")
  return DecodeFit(base_s, request_s, read_s)


def _without_backups(steps: Steps, held_s: np.ndarray) -> Steps:
  """Steps as if they had not waited `held_s` [steps] for their backups."""
  return dataclasses.replace(
    steps,
    prefill_s=np.maximum(steps.prefill_s - np.where(steps.has_prefill, held_s, 0.0), 0.0),
    decode_s=np.maximum(steps.decode_s - np.where(steps.has_prefill, 0.0, held_s), 0.0),
  )


def _fit_backups(quiet: Steps, costs: CostModel, backup_s: np.ndarray) -> Fitted | str:
  """Which share of its backups a step waits for: what it takes longer than steps without any.

  Compared are steps of one kind: passes with prefills, and decode parts of as many steps. What the
  fit misses in a whole kind is none of the backups' doing.

  Returns:
    The share, or why the steps do not tell it.
  """
  if not (backup_s > 0).any():
    return "no backups beside steps without loads"
  measured_s = np.where(quiet.has_prefill, quiet.prefill_s, quiet.decode_s)
  predicted_s = np.where(quiet.has_prefill, *beside.predict(quiet, costs))
  longer_s, compared = measured_s - predicted_s, np.zeros(len(backup_s), bool)
  kind = np.where(quiet.has_prefill, 0.0, quiet.decode_steps)
  for one in np.unique(kind):
    alike = kind == one
    without = alike & (backup_s == 0)
    if without.sum() >= TELLING_STEPS:
      longer_s[alike] -= np.median((measured_s - predicted_s)[without])
      compared |= alike & (backup_s > 0)
  if not compared.any():
    return f"fewer than {TELLING_STEPS} steps of a kind without backups to compare with"
  share = least_absolute.weighted_median(
    (longer_s / np.where(compared, backup_s, 1.0))[compared],
    (backup_s / np.maximum(measured_s, predicted_s))[compared],
  )
  return Fitted(value=share if share > 1e-3 else 0.0, steps=int(compared.sum()))


def _residuals(
  steps: Steps, decode: Steps, prefill: Steps, costs: CostModel, loads: bool
) -> dict[str, Residual]:
  found = {}

  def add(kind: str, predicted: np.ndarray, measured: np.ndarray) -> None:
    if len(measured):
      error = np.abs(predicted - measured) / np.maximum(measured, 1e-12)
      bias = float(predicted.sum() / measured.sum() - 1)
      found[kind] = Residual(steps=len(measured), median_error=float(np.median(error)), bias=bias)

  backup_s = lambda some: beside.seconds(costs.backup_hold_s, some.backup_tokens, costs)
  _, decode_s = beside.predict(decode, costs)
  alone = np.where(decode.has_prefill, 0.0, backup_s(decode))
  add("decode", decode_s + alone, decode.decode_s)
  predicted_s = np.array(beside.predict(prefill, costs))  # [prefill and decode, steps]
  predicted_s[0] += backup_s(prefill)
  apart = ~prefill.joint
  add("prefill", predicted_s[0, apart], prefill.prefill_s[apart])
  whole_s = prefill.prefill_s + prefill.decode_s
  add("joint", predicted_s.sum(axis=0)[prefill.joint], whole_s[prefill.joint])
  if loads:
    for kind, predicted, measured in beside.residuals(steps, costs):
      add(kind, predicted, measured)
  return found


def kinds(residuals: dict[str, Residual]) -> Sequence[str]:
  """A line for each kind of step."""
  return [
    f"{kind}: {one.steps} steps, median error {one.median_error:.1%}, bias {one.bias:+.1%}"
    for kind, one in residuals.items()
  ]
