"""An independent forward pass in float64 numpy: no pages, no cache, heads one by one."""

import dataclasses
import math

import numpy as np


def frequencies(config):
  """Rotary frequencies one by one, the Llama-3.1 rule as a wavelength rule."""
  out = []
  for i in range(config.head_dim // 2):
    frequency = 1.0 / config.rope_theta ** (2 * i / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
      wavelength = 2 * math.pi / frequency
      longest = scaling.original_context_tokens / scaling.low_freq_factor
      shortest = scaling.original_context_tokens / scaling.high_freq_factor
      if wavelength > longest:
        frequency /= scaling.factor
      elif wavelength >= shortest:
        smooth = (scaling.original_context_tokens / wavelength - scaling.low_freq_factor) / (
          scaling.high_freq_factor - scaling.low_freq_factor
        )
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    out.append(frequency)
  return np.array(out)


def tensors(config, layer):
  """What a layer was built of, by name: wq, wk and wv (and biases) apart."""
  heads = np.array([config.num_heads, config.kv_heads]).cumsum() * config.head_dim
  named = {}
  for field in dataclasses.fields(layer):
    array = getattr(layer, field.name)
    if array is None:
      continue
    if field.name in ("wqkv", "bqkv"):
      parts = zip("qkv", np.split(np.asarray(array), heads, axis=-1), strict=True)
      named |= {field.name[0] + of: part for of, part in parts}
    else:
      named[field.name] = np.asarray(array)
  return named


def forward(config, params, token_ids):
  """Logits [tokens, vocab] of a whole sequence."""
  f = lambda a: np.asarray(a, np.float64)
  norm = lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * f(w)
  n, d = len(token_ids), config.head_dim
  angles = np.arange(n)[:, None] * frequencies(config)
  cos, sin = np.cos(angles), np.sin(angles)

  def turn(x):  # [n, d]
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

  mask = np.triu(np.full((n, n), -np.inf), 1)
  x = f(params.embedding)[np.asarray(token_ids)]
  for layer in params.layers:
    y = norm(x, layer.attn_norm)
    own = tensors(config, layer)
    q, k, v = (y @ f(own["w" + of]) + f(own.get("b" + of, 0)) for of in "qkv")
    heads = []
    for head in range(config.num_heads):
      own = slice(head * d, (head + 1) * d)
      shared = head // (config.num_heads // config.kv_heads)
      kv = slice(shared * d, (shared + 1) * d)
      scores = turn(q[:, own]) @ turn(k[:, kv]).T / math.sqrt(d) + mask
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv])
    x = x + np.concatenate(heads, axis=1) @ f(layer.wo)
    y = norm(x, layer.mlp_norm)
    gate = y @ f(layer.gate)
    x = x + (gate / (1 + np.exp(-gate)) * (y @ f(layer.up))) @ f(layer.down)
  return norm(x, params.head.norm) @ f(params.head.output).T
