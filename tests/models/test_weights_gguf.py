"""GGUF files written by the test and the real one."""

import dataclasses

import numpy as np
import pytest

from strata_jax import config as config_lib
from strata_jax.models import errors, llama, random, weights_gguf
from tests.models import hf_folder
from tests.models.real_file import smollm2_file
from tests.models.test_weights_hf import assert_equal_params

gguf = pytest.importorskip("gguf")

MODEL = dataclasses.replace(
  config_lib.MODELS["tiny"], hidden_size=64, intermediate_size=96, head_dim=16
)
QWEN = dataclasses.replace(MODEL, qkv_bias=True, tie_embeddings=False)


def adjacent_pairs(array, heads):
  """The published conversion to GGUF: rows (i, i + head_dim/2) of each head to (2i, 2i+1)."""
  rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
  return rows.swapaxes(1, 2).reshape(array.shape)


def write(path, config, tensors, kind, *, arch="llama", extra=None, drop=()):
  """A GGUF file; matrices in the type `kind`, vectors in F32."""
  writer = gguf.GGUFWriter(path, arch)
  fields = {
    "block_count": config.num_layers, "embedding_length": config.hidden_size,
    "feed_forward_length": config.intermediate_size, "context_length": config.context_tokens,
    "attention.head_count": config.num_heads, "attention.head_count_kv": config.kv_heads,
    "attention.key_length": config.head_dim,
  }  # fmt: skip
  for name, value in fields.items():
    if name not in drop:
      writer.add_uint32(f"{arch}.{name}", value)
  writer.add_float32(f"{arch}.rope.freq_base", config.rope_theta)
  writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
  writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
  kind = gguf.GGMLQuantizationType[kind]
  for name, array in tensors.items():
    if array.ndim == 1:
      writer.add_tensor(name, array.astype(np.float32))
    else:
      writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
  for name, array in (extra or {}).items():
    writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def gguf_tensors(config, params, arch="llama"):
  """GGUF names, Q and K in the row order of the architecture."""
  out = {}
  for name, array in hf_folder.named_tensors(config, params).items():
    stored = weights_gguf._gguf_name(name)
    heads = {"attn_q": config.num_heads, "attn_k": config.kv_heads}.get(stored.split(".")[-2], 0)
    out[stored] = adjacent_pairs(array, heads) if heads and arch == "llama" else array
  return out


def rounded(params, kind):
  """What the type can hold of the matrices, by the package's own quantise and dequantise."""
  kind = gguf.GGMLQuantizationType[kind]

  def turn(array, stored):
    array = np.asarray(array)
    if array.ndim == 1:
      return array
    array = np.ascontiguousarray(array.T if stored else array)
    array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    return array.T if stored else array

  layers = tuple(
    type(layer)(
      **{
        field.name: None
        if getattr(layer, field.name) is None
        else turn(getattr(layer, field.name), True)
        for field in dataclasses.fields(layer)
      }
    )
    for layer in params.layers
  )
  head = llama.HeadParams(norm=params.head.norm, output=turn(params.head.output, False))
  return llama.Params(embedding=turn(params.embedding, False), layers=layers, head=head)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_reads_back_exactly_what_the_type_holds(tmp_path, kind):
  params = random.random_params(MODEL, seed=2)
  path = tmp_path / "model.gguf"
  write(path, MODEL, gguf_tensors(MODEL, params), kind)
  file = weights_gguf.GgufFile(path)
  config = file.read_config()
  assert config == dataclasses.replace(MODEL, name="model", eos_token_ids=(2,))
  assert_equal_params(file.read_params(config), rounded(params, kind))


def test_qwen_has_biases_and_keeps_its_row_order(tmp_path):
  params = random.random_params(QWEN, seed=2)
  path = tmp_path / "model.gguf"
  write(path, QWEN, gguf_tensors(QWEN, params, "qwen2"), "F32", arch="qwen2")
  file = weights_gguf.GgufFile(path)
  config = file.read_config()
  assert config == dataclasses.replace(QWEN, name="model", eos_token_ids=(2,))
  assert_equal_params(file.read_params(config), params)


def test_llama31_frequencies_are_recognised(tmp_path):
  model = dataclasses.replace(
    MODEL, rope_theta=500000.0, rope_scaling=config_lib.MODELS["llama31_8b"].rope_scaling
  )
  plain = llama.scaled_frequencies(500000.0, 16, None)
  divisors = (plain / llama.scaled_frequencies(500000.0, 16, model.rope_scaling)).astype(np.float32)
  tensors = gguf_tensors(model, random.random_params(model))
  path = tmp_path / "model.gguf"
  write(path, model, tensors, "F32", extra={"rope_freqs.weight": divisors})
  assert weights_gguf.GgufFile(path).read_config().rope_scaling == model.rope_scaling
  write(path, model, tensors, "F32", extra={"rope_freqs.weight": divisors[::-1].copy()})
  with pytest.raises(errors.WeightsError, match="not the Llama-3 scaling"):
    weights_gguf.GgufFile(path).read_config()


def test_rotate_half_order_undoes_the_conversion():
  array = np.arange(3 * 8 * 2).reshape(24, 2)
  pairs = adjacent_pairs(array, 3)
  assert not np.array_equal(pairs, array)
  np.testing.assert_array_equal(weights_gguf.rotate_half_order(pairs, 3), array)


def test_refusals(tmp_path):
  path = tmp_path / "model.gguf"
  tensors = gguf_tensors(MODEL, random.random_params(MODEL))

  def read():
    file = weights_gguf.GgufFile(path)
    return file.read_params(file.read_config())

  def refused(message):
    with pytest.raises(errors.WeightsError, match=message) as error:
      read()
    assert "\n" not in str(error.value)

  path.write_bytes(b"no GGUF at all")
  refused("not a GGUF file")
  write(path, MODEL, tensors, "F32", arch="mamba")
  refused("architecture mamba: expected one of llama, qwen2")
  write(path, MODEL, tensors, "F32", drop=("block_count",))
  refused("missing field llama.block_count")
  write(path, MODEL, {k: v for k, v in tensors.items() if k != "blk.1.ffn_up.weight"}, "F32")
  refused("missing tensor model.layers.1.mlp.up_proj.weight")
  write(path, MODEL, tensors | {"blk.0.attn_k.weight": tensors["blk.0.attn_q.weight"]}, "F32")
  refused(r"self_attn.k_proj.weight: expected shape \(32, 64\), got \(64, 64\)")


def test_the_real_file():
  file = smollm2_file()
  config = file.read_config()
  preset = config_lib.MODELS["smollm2_135m"]
  assert config == dataclasses.replace(preset, name=config.name)
  # One row of a Q4_1 matrix by the published formula: value = d * q + m.
  block = file._tensors["blk.3.attn_q.weight"].data[7, :20]
  d, m = block[:4].copy().view(np.float16).astype(np.float32)
  nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4])
  got = file._dequantised("blk.3.attn_q.weight")[7, :32]
  np.testing.assert_array_equal(got, d * nibbles.astype(np.float32) + m)
