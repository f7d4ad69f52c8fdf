"""Seconds of prefill, decode and transfers, from a profile. Standard library only.

Prefill pass of chunks i with t_i new tokens behind c_i context tokens:
  matmul = max(2 * params * sum(t_i) / flops, weight bytes / read rate)
  attention = sum_i max(a * (t_i c_i + t_i^2 / 2) / attention flops, kv * (c_i + t_i) / read rate)
  pass = matmul + attention + all-reduces + overhead
A decode step is the same with t_i = 1 and the overlap of nothing; what it reads of contexts that
requests share is the executor's affair (`shared_reads`). A joint pass is a prefill pass with one
more token in its matmul for each decode, the attention of both and a head for either part: the
weights are read once. A transfer of n fragments takes latency + bytes / rate(back end, fragment
bytes).

What an executor adds (`profile.ExecutorCosts`): an overhead for each chunk and each request of a
decode step, for each prefill pass and for each joint one; with `chunks_apart` the matmul of a pass
is the sum of its chunks' own. Prefills that are padded to buckets cost what the padded shapes do.
"""

import dataclasses
import math
from collections.abc import Sequence

from strata_jax import validation
from strata_jax.executors.buckets import Buckets
from strata_jax.executors.step_shapes import shapes_of
from strata_jax.profile import Link, Profile
from strata_jax.scheduler.views import Costs

BACKENDS = (
  "none", "kernel", "copy_engine", "memcpy_async", "memcpy_batch", "device_put", "auto",
)  # fmt: skip
OVERLAPS = ("none", "whole", "layer")
# `auto` loads fragments of so many bytes and more by copies of the driver, not by the kernel.
DRIVER_FRAGMENT_BYTES = 128 << 10
# And parked ones by copies of whole pages, of so many bytes and more.
DRIVER_PAGE_BYTES = 256 << 10
# Blocks of the kernel by direction: few ones fill the link already.
LOAD_BLOCKS, STORE_BLOCKS, UNCAPPED_BLOCKS = 2, 1, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class IoConfig:
  """How a system moves pages. Fields as in SystemConfig."""

  page_size: int = 1
  load_backend: str = "kernel"
  store_backend: str = "auto"
  separate_kv_copies: bool = False
  capped_blocks: bool = True
  overlap: str = "layer"
  load_is_free: bool = False

  def __post_init__(self) -> None:
    validation.check_int(self, "page_size", minimum=1)
    validation.check_choice(self, "load_backend", BACKENDS)
    validation.check_choice(self, "store_backend", BACKENDS)
    validation.check_choice(self, "overlap", OVERLAPS)


class CostModel:
  """The costs of one model on one machine with one way to move pages."""

  def __init__(self, profile: Profile, io: IoConfig, buckets: Buckets | None = None) -> None:
    """Takes a profile, how pages are moved, and the shapes that prefills are padded to, if any."""
    self.profile = profile
    self.buckets = buckets
    self.io = io
    hardware, model = profile.hardware, profile.model
    self.layers = model.num_layers
    devices = profile.devices
    self._flops = hardware.matmul_flops * hardware.matmul_efficiency * devices
    self._attention_flops = hardware.attention_flops * devices
    self._weight_rate = hardware.weight_read_bytes_per_s * devices
    # Latent KV that every device holds whole is read by every device.
    shares = devices if profile.kv_sharded else 1
    self._kv_read_s = model.kv_bytes_token_layer / (hardware.attention_read_bytes_per_s * shares)
    self._kv_shares = shares
    self._dense_params = model.layer_params
    self._active_params = model.layer_params + model.experts_per_token * model.expert_params
    kind = "copy"
    if io.load_backend in ("kernel", "auto"):
      kind = "kernel" if io.capped_blocks else "kernel_uncapped"
    self.interference = profile.interference[kind]
    self._executor = profile.executor
    self._decode_base_s: dict[int, float] = {}  # what a step costs beside attention, by requests
    self.load_rate = self._rate(
      profile.load, io.load_backend, LOAD_BLOCKS, by_layer=io.overlap == "layer"
    )
    self.backup_rate = self._rate(profile.backup, io.store_backend, STORE_BLOCKS)

  # Compute

  def prefill_layer_s(
    self, chunks: Sequence[tuple[int, int]], decodes: int = 0, read_tokens: float = 0
  ) -> float:
    """One layer of a pass over chunks (new tokens, context tokens), nothing else running.

    With `decodes` so many rows of a decode step are in it, which reads the KV of `read_tokens`.
    """
    if self.buckets is not None:
      return self._padded_layer_s(chunks, self.buckets, decodes, read_tokens)
    model, executor = self.profile.model, self._executor
    tokens = sum(new for new, _ in chunks) + decodes
    if executor.chunks_apart and not decodes:
      matmul_s = math.fsum(self._matmul_s(new) for new, _ in chunks)
    else:
      matmul_s = self._matmul_s(tokens)
    matmul_s += len(chunks) * executor.chunk_overhead_s + decodes * executor.decode_request_s
    matmul_s += self._pass_s(decodes)
    attention_s = read_tokens * self._kv_read_s
    for new, context in chunks:
      products = new * context + 0.5 * new * new
      flops_s = model.attention_flops_token_context_layer * products / self._attention_flops
      attention_s += max(flops_s, (context + new) * self._kv_read_s)
    return matmul_s / self.layers + attention_s + self._allreduce_s(tokens)

  def _padded_layer_s(
    self, chunks: Sequence[tuple[int, int]], buckets: Buckets, decodes: int, read_tokens: float
  ) -> float:
    """The same in padded shapes: each batch is a pass, padded tokens attend like others."""
    batches, pieces = shapes_of(chunks, buckets)
    if decodes:
      batches = [sum(batches) + decodes]
    matmul_s = math.fsum(self._matmul_s(tokens) for tokens in batches)
    matmul_s += len(chunks) * self._executor.chunk_overhead_s
    matmul_s += decodes * self._executor.decode_request_s
    matmul_s += self._pass_s(decodes)
    product_s = self.profile.model.attention_flops_token_context_layer / self._attention_flops
    attention_s = math.fsum(
      max(
        product_s * padded * (before + 0.5 * tokens), (before + tokens) * self._kv_read_s
      )
      for tokens, padded, before in pieces
    )  # fmt: skip
    attention_s += read_tokens * self._kv_read_s
    return matmul_s / self.layers + attention_s + self._allreduce_s(sum(batches))

  def prefill_s(
    self, chunks: Sequence[tuple[int, int]], decodes: int = 0, read_tokens: float = 0
  ) -> float:
    """A whole pass without any load; with `decodes` one with them, up to the prefills' tokens."""
    head_s = self.head_s(len(chunks))
    layers_s = self.layers * self.prefill_layer_s(chunks, decodes, read_tokens)
    return layers_s + head_s + self.profile.hardware.pass_overhead_s

  def joint_s(self, chunks: Sequence[tuple[int, int]], requests: int, read_tokens: float) -> float:
    """One pass over the chunks and a decode step of `requests`, up to the tokens of both."""
    return self.prefill_s(chunks, requests, read_tokens) + self.head_s(requests)

  def prefill_tail_s(self, requests: int) -> float:
    """What a pass costs beside its layers."""
    return self.head_s(requests) + self.profile.hardware.pass_overhead_s

  def head_s(self, requests: int) -> float:
    """The tokens of so many requests, from what the last layer gave."""
    model = self.profile.model
    flops_s = 2.0 * model.head_params * requests / self._flops
    return max(flops_s, model.head_params * model.weight_item_bytes / self._weight_rate)

  def decode_step_s(self, requests: int, read_tokens: float) -> float:
    """One step of `requests` requests that reads the KV of `read_tokens` tokens in sum."""
    base_s = self._decode_base_s.get(requests)
    if base_s is None:
      layers_s = self._matmul_s(requests) + self.layers * self._allreduce_s(requests)
      base_s = layers_s + self.prefill_tail_s(requests)
      base_s += requests * self._executor.decode_request_s
      self._decode_base_s[requests] = base_s
    return base_s + self.layers * read_tokens * self._kv_read_s

  # Transfers

  def token_bytes(self) -> float:
    """Bytes that one token puts on one device's link."""
    return self.profile.kv_bytes_token / self._kv_shares

  def load_s(self, pages: int) -> float:
    """Host to device, without waiting for the link."""
    if self.io.load_is_free or not pages:
      return 0.0
    return self.profile.hardware.transfer_latency_s + pages * self.page_load_s()

  def page_load_s(self) -> float:
    if self.io.load_is_free or not self.load_rate:  # nothing is loaded without a back end
      return 0.0
    return self._page_bytes() / self.load_rate

  @property
  def parked_in_turn(self) -> bool:
    """Whether parked loads come one after the other: layer by layer a kernel brings all at once."""
    io = self.io
    by_kernel = io.load_backend == "kernel" or (
      io.load_backend == "auto" and self._page_bytes() < DRIVER_PAGE_BYTES
    )
    return not (by_kernel and io.overlap == "layer")

  def backup_s(self, pages: int) -> float:
    if not pages:
      return 0.0
    return self.profile.hardware.transfer_latency_s + pages * self._page_bytes() / self.backup_rate

  def backup_hold_s(self, pages: int) -> float:
    """How long a step waits for its backups."""
    share = self._executor.backups_hold_compute
    return share * pages * self._page_bytes() / self.backup_rate if share else 0.0

  def costs(self) -> Costs:
    """What a policy may know: linear costs of a token."""
    model = self.profile.model
    return Costs(
      load_s_per_token=self.page_load_s() / self.io.page_size,
      load_latency_s=0.0 if self.io.load_is_free else self.profile.hardware.transfer_latency_s,
      prefetch_s_per_token=self.profile.kv_bytes_token / self.profile.storage.read_bytes_per_s,
      compute_s_per_token=2.0 * self._active_params / self._flops,
      compute_s_per_token_context=(
        self.layers * model.attention_flops_token_context_layer / self._attention_flops
      ),
      decode_step_s=self.decode_step_s(1, 1),
    )

  # Parts

  def _matmul_s(self, tokens: int) -> float:
    """The projections of all layers for `tokens` tokens."""
    model = self.profile.model
    params = self._dense_params
    if model.experts:
      # Expected share of the experts that any of the tokens is sent to.
      touched = 1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens
      params += touched * model.experts * model.expert_params
    flops_s = 2.0 * self._active_params * tokens / self._flops
    return max(flops_s, params * model.weight_item_bytes / self._weight_rate)

  def _pass_s(self, decodes: int) -> float:
    """What a prefill pass takes whatever is in it, in its layers."""
    return self._executor.prefill_pass_s + (self._executor.joint_pass_s if decodes else 0.0)

  def _allreduce_s(self, tokens: int) -> float:
    """Two ring all-reduces of the bfloat16 activations in each layer."""
    devices = self.profile.devices
    if devices == 1:
      return 0.0
    hardware = self.profile.hardware
    moved = 2.0 * (devices - 1) / devices * tokens * self.profile.model.hidden_size * 2
    return 2.0 * (hardware.allreduce_latency_s + moved / hardware.allreduce_bytes_per_s)

  def _page_bytes(self) -> float:
    return self.io.page_size * self.token_bytes()

  def _rate(self, link: Link, backend: str, capped_blocks: int, *, by_layer: bool = False) -> float:
    """Bytes per second on one device's link; 0 where nothing is moved.

    Layer by layer the driver has fragments to copy, else whole pages.
    """
    if backend == "none":
      return 0.0
    blocks = capped_blocks if self.io.capped_blocks else UNCAPPED_BLOCKS
    page_bytes = self._page_bytes()
    fragment_bytes = page_bytes / self.layers
    kernel = link.kernel[blocks].bytes_per_s(fragment_bytes)
    if backend == "kernel":
      return kernel
    if backend == "auto" and by_layer:
      return max(kernel, link.copies["memcpy_batch"].bytes_per_s(fragment_bytes))
    if backend == "auto":
      return max(kernel, link.copies["copy_engine"].bytes_per_s(page_bytes))
    if backend in ("copy_engine", "device_put"):  # whole page-first pages
      return link.copies[backend].bytes_per_s(page_bytes)
    copies = 2 if self.io.separate_kv_copies else 1
    return link.copies[backend].bytes_per_s(fragment_bytes / copies)
