"""Fits what a prefill pass takes: what is fixed, chunks, tokens, attention, and decodes in it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from strata_jax import least_absolute
from strata_jax.calibration_found import Found
from strata_jax.calibration_steps import Steps
from strata_jax.executors.buckets import Buckets
from strata_jax.executors.step_shapes import shapes_of

_TELLING = 0.05  # a term counts in a step where it makes up this share of it,
TELLING_STEPS = 8  # and is fitted where it counts in so many
_ODD = 3.0  # steps that take so many times what is predicted count as that
_AS_GOOD = 1.1  # times the loss that a fit counted on
_FEW = 4  # passes with decodes, and without, that tell what these add to a pass
_ROUNDS = 8  # of which side of a maximum each chunk is on


class DecodeFit(NamedTuple):
  """Seconds of a decode step: whatever it does, a request, a token whose KV is read."""

  base_s: float
  request_s: float
  read_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Passes:
  """Prefill passes: chunks in a row, with the pass that each belongs to."""

  seconds: np.ndarray  # without what decodes in them add beside their tokens [passes]
  count: np.ndarray  # chunks [passes]
  joint: np.ndarray  # 1.0: decodes go along [passes]
  backup_s: np.ndarray  # [passes]
  batch_owner: np.ndarray  # int [batches]: what reads the weights once
  tokens: np.ndarray  # with those of decodes in the pass [batches]
  owner: np.ndarray  # int [pieces]: what attends to one context
  products: np.ndarray  # new tokens times mean context [pieces]
  read: np.ndarray  # tokens whose KV is read [pieces]

  @property
  def of_both_kinds(self) -> int:
    """Passes with decodes, or without, whichever are fewer."""
    joint = int(self.joint.sum())
    return min(joint, len(self.joint) - joint)

  def sum(self, values: np.ndarray) -> np.ndarray:
    """Of pieces, by pass."""
    return np.bincount(self.owner, values, len(self.seconds))

  def sum_batches(self, values: np.ndarray) -> np.ndarray:
    """Of batches, by pass."""
    return np.bincount(self.batch_owner, values, len(self.seconds))


def _passes(
  prefill: Steps, backup_s: np.ndarray, step: DecodeFit, apart: bool, buckets: Buckets | None
) -> _Passes:
  """All chunks are one batch, or each is one of its own, or they are packed into buckets.

  With decodes all is one batch.
  """
  decodes = np.where(prefill.joint, prefill.decode_requests, 0.0)
  decodes_s = decodes * step.request_s
  decodes_s += np.where(prefill.joint, prefill.first_read_tokens, 0.0) * step.read_s
  batches: list[tuple[int, int]] = []
  pieces: list[tuple[int, float, int]] = []
  for index, chunks in enumerate(prefill.chunks):
    if buckets is not None:
      sizes, parts = shapes_of(chunks, buckets)
      pieces += [(index, p.padded * (p.before + 0.5 * p.tokens), p.before + p.tokens)
                 for p in parts]  # fmt: skip
    else:
      sizes = [new for new, _ in chunks] if apart else [sum(new for new, _ in chunks)]
      pieces += [(index, new * (before + 0.5 * new), before + new) for new, before in chunks]
    if decodes[index]:
      sizes = [sum(sizes) + int(decodes[index])]
    batches += [(index, size) for size in sizes]
  batch_owner, tokens = np.array(batches, np.float64).T
  owner, products, read = np.array(pieces, np.float64).T
  return _Passes(
    seconds=prefill.prefill_s - decodes_s,
    count=np.array([len(one) for one in prefill.chunks], np.float64),
    joint=prefill.joint.astype(np.float64),
    backup_s=backup_s, batch_owner=batch_owner.astype(np.int64), tokens=tokens,
    owner=owner.astype(np.int64), products=products, read=read,
  )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PassFit:
  """Seconds of a pass beside the reading of weights, and its products' rates."""

  weights_s: float
  chunk_s: float
  pass_s: float
  joint_s: float
  token_s: float
  product_s: float
  telling: tuple[int, int]  # passes in which products by tokens, and those of attention, count

  def predict(self, passes: _Passes, fixed_s: float, kv_s: float) -> np.ndarray:
    """Seconds of every pass, without its backups."""
    seconds = fixed_s + self.chunk_s * passes.count + self.pass_s + self.joint_s * passes.joint
    seconds = seconds + passes.sum_batches(np.maximum(self.token_s * passes.tokens, self.weights_s))
    attention = np.maximum(self.product_s * passes.products, kv_s * passes.read)
    return seconds + passes.sum(attention)


def fit_prefill(
  found: Found, prefill: Steps, backup_s: np.ndarray, step: DecodeFit, buckets: Buckets | None
) -> None:
  """A pass is fixed + chunks + products of tokens, or the weights' reading, + attention.

  To that comes what every pass takes more than a decode step, and what decodes add to one.

  What a decode step without requests takes is the reading of the weights and what is fixed; weights
  are read no faster than device memory is copied.
  """
  profile, model = found.profile, found.profile.model
  hardware, decode_base_s = profile.hardware, step.base_s
  token_s = 2.0 * model.layer_params / (hardware.matmul_flops * hardware.matmul_efficiency)
  flops = model.num_layers * model.attention_flops_token_context_layer
  start = token_s, flops / hardware.attention_flops
  kv_s = profile.kv_bytes_token / hardware.attention_read_bytes_per_s
  head = model.head_params / model.layer_params  # its share of what is fixed: the head's weights
  low_s = decode_base_s * head / (1 + head)
  weight_bytes = model.layer_params * model.weight_item_bytes
  most_s = max(low_s, decode_base_s - weight_bytes / hardware.copy_bytes_per_s)
  usual_s = (hardware.pass_overhead_s + head * decode_base_s) / (1 + head)

  several = max(len(one) for one in prefill.chunks) > 1 and buckets is None
  ways = {apart: _passes(prefill, backup_s, step, apart, buckets) for apart in {False, several}}

  def fit_pass(fixed_s: float, apart: bool) -> tuple[float, _PassFit]:
    return _fit_pass(ways[apart], fixed_s, decode_base_s - fixed_s, kv_s, start)

  best: tuple[float, bool, float, _PassFit] | None = None
  for apart in sorted(ways):
    # The second term decides only where the steps do not tell.
    loss = lambda fixed_s, apart=apart: (
      fit_pass(fixed_s, apart)[0] + 1e-6 * abs(fixed_s - usual_s) / decode_base_s
    )
    fixed_s, _ = least_absolute.minimize(loss, low_s, most_s, grid=9, rounds=24)
    found_loss, one = fit_pass(fixed_s, apart)
    if best is None or found_loss < 0.98 * best[0]:
      best = (found_loss, apart, fixed_s, one)
  assert best is not None
  _, apart, fixed_s, one = best
  steps = len(prefill.chunks)
  rate = model.layer_params * model.weight_item_bytes / max(one.weights_s, 1e-9)
  head_s = model.head_params * model.weight_item_bytes / rate
  found.put("hardware.weight_read_bytes_per_s", rate, steps)
  found.put("hardware.pass_overhead_s", max(0.0, fixed_s - head_s), steps)
  found.put("executor.chunk_overhead_s", one.chunk_s, steps)
  found.put("executor.prefill_pass_s", one.pass_s, steps)
  both = ways[apart].of_both_kinds
  if both >= _FEW:
    found.put("executor.joint_pass_s", one.joint_s, both)
  elif prefill.joint.any():
    found.keep("executor.joint_pass_s", f"only {both} passes with decodes, or without, to compare")
  if buckets is None:
    found.put("executor.chunks_apart", float(apart), steps)
  else:
    found.keep("executor.chunks_apart", "batches of prefills are those of the known shapes")
  for key, telling, value in (
    ("hardware.matmul_efficiency", one.telling[0],
     2.0 * model.layer_params / (hardware.matmul_flops * one.token_s)),
    ("hardware.attention_flops", one.telling[1], flops / one.product_s),
  ):  # fmt: skip
    if telling >= TELLING_STEPS:
      found.put(key, value, telling)
    else:
      found.keep(key, "too few prefill steps tell it")


def _fit_pass(
  passes: _Passes, fixed_s: float, weights_s: float, kv_s: float, start: tuple[float, float],
) -> tuple[float, _PassFit]:  # fmt: skip
  """The loss and the terms of a pass, what is fixed being given.

  Which side of a maximum counts depends on what is fitted: taken from the last round's numbers.
  """
  token_s, product_s = start
  seconds = passes.seconds
  best: tuple[float, _PassFit] | None = None
  for _ in range(_ROUNDS):
    by_products = product_s * passes.products > kv_s * passes.read
    known = fixed_s + passes.sum(np.where(by_products, 0.0, kv_s * passes.read))
    products = passes.sum(np.where(by_products, passes.products, 0.0))
    by_tokens = token_s * passes.tokens > weights_s
    tokens = passes.sum_batches(np.where(by_tokens, passes.tokens, 0.0))
    known = known + weights_s * passes.sum_batches(np.where(by_tokens, 0.0, 1.0))
    telling = tuple(
      int((one * rate > _TELLING * seconds).sum())
      for one, rate in ((tokens, token_s), (products, product_s))
    )
    told = [count >= TELLING_STEPS for count in telling]
    counts = np.where(passes.count.std() > 0, passes.count, 0.0)
    terms = (tokens, start[0]), (products, start[1])
    loss, fitted, told = _fit_terms(passes, counts, terms, told, known)
    telling = tuple(count if is_told else 0 for count, is_told in zip(telling, told, strict=True))
    token_s, product_s = (
      float(found) if is_told else rate
      for found, (_, rate), is_told in zip(fitted[4:], terms, told, strict=True)
    )
    one = _PassFit(
      weights_s=weights_s, chunk_s=float(fitted[0]), pass_s=float(fitted[2]),
      joint_s=float(fitted[3]), token_s=token_s, product_s=product_s,
      telling=(telling[0], telling[1]),
    )  # fmt: skip
    predicted_s = one.predict(passes, fixed_s, kv_s) + fitted[1] * passes.backup_s
    really = float(np.mean(least_absolute.errors(predicted_s, seconds)))
    if really > _AS_GOOD * loss:  # these numbers mean other sides than they were fitted with
      loss = really
    if best is None or loss < best[0]:
      longer = float(np.mean(clipped(seconds, predicted_s) / np.maximum(predicted_s, 1e-12))) - 1
      longer_s = longer * float(np.median(predicted_s / passes.count))
      best = loss, dataclasses.replace(one, chunk_s=max(0.0, one.chunk_s + longer_s))
  assert best is not None
  return best


def _fit_terms(
  passes: _Passes, counts: np.ndarray, terms: tuple[tuple[np.ndarray, float], ...],
  told: list[bool], known: np.ndarray,
) -> tuple[float, np.ndarray, list[bool]]:  # fmt: skip
  """The best coefficients of chunks, backups, passes, joint ones and `terms`.

  Each term is a feature and the base's rate.

  A term that few passes tell of keeps the base's rate. Where all chunks are much alike their number
  may take the place of a term, which would leave it without any meaning: then either chunks cost
  nothing beside the terms, or the term keeps the base's rate, whichever is nearer to the times.

  Returns:
    The loss, the coefficients, and which terms were fitted.
  """

  def fit(counts: np.ndarray, told: list[bool]) -> tuple[float, np.ndarray, list[bool]]:
    kept = [rate * one for (one, rate), is_told in zip(terms, told, strict=True) if not is_told]
    given = known + sum(kept)
    joint = passes.joint * (passes.of_both_kinds >= _FEW)
    columns = [counts, passes.backup_s, np.ones_like(known), joint]
    for (one, _), is_told in zip(terms, told, strict=True):
      columns.append(one if is_told else np.zeros_like(one))
    features = np.stack(columns, axis=1)  # [passes, 4 + terms]
    fitted = least_absolute.fit(features, passes.seconds, given)
    loss = float(np.mean(least_absolute.errors(features @ fitted + given, passes.seconds)))
    lost = [is_told and not fitted[4 + term] for term, is_told in enumerate(told)]
    if not any(lost):
      return loss, fitted, told
    left = [is_told and not is_lost for is_told, is_lost in zip(told, lost, strict=True)]
    found = [fit(counts, left)]
    if counts.any():
      found.append(fit(np.zeros_like(counts), told))
    return min(found, key=lambda one: one[0])

  return fit(counts, told)


def clipped(measured_s: np.ndarray, predicted_s: np.ndarray) -> np.ndarray:
  """What was measured, as far as it is no multiple of what was predicted."""
  return np.clip(measured_s, predicted_s / _ODD, predicted_s * _ODD)
