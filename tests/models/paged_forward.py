"""Logits of a prompt through the programs that serve it, over pages of a small pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.executors import programs
from strata_jax.models import llama
from strata_jax.tiers import device


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, head, x):
  return llama.logits(config, head, x[0, -1])


def prompt_logits(config, params, token_ids, *, page_size=4, attention="xla", splits=()):
  """Float32 [vocab]: behind the last token of a prompt that is computed split by split."""
  pages = -(-len(token_ids) // page_size)
  pool = list(device.make_device_pool(config.page_layout(page_size), pages + 2))
  table = jnp.asarray(np.arange(pages)[None, ::-1] + 1, jnp.int32)
  start = 0
  for end in (*splits, len(token_ids)):
    x = llama.embed(params.embedding, jnp.asarray([token_ids[start:end]], jnp.int32))
    where = programs.Where(table, jnp.int32([start]), jnp.int32([end - start]))
    for index, layer in enumerate(params.layers):
      x, pool[index] = programs.layer(
        layer, x, pool[index], where, config=config, implementation=attention
      )
    start = end
  return np.asarray(_logits(config, params.head, x))
