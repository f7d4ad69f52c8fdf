"""The tokenizer that the real weights carry, against the published one."""

import json

import numpy as np
import pytest

from strata_jax.models import errors, tokenizer
from tests.models.real_file import smollm2_file
from tests.shared_data import shared_data

TEXTS = (
  "",
  "x",
  "  leading and trailing  \n\n\tx",
  "Ελλάδα, 日本語テスト, naïve café, 🙂👍🏽, \u200b\u00a0, עברית",
  "3.14159 2024-01-01 1234567890",
  "def f(x):\n    return x**2  # comment\n",
  "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><empty_output>",
  "It's we'll I'M don't",
)


@pytest.fixture(scope="module")
def stored():
  file = smollm2_file()
  return tokenizer.from_gguf(file.tokenizer_fields(), str(file.path))


@pytest.fixture(scope="module")
def published():
  pytest.importorskip("tokenizers")
  return tokenizer.from_file(shared_data("smollm2/tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_short_texts(stored, published, text):
  ids = stored.encode(text)
  assert ids.dtype == np.int32
  np.testing.assert_array_equal(ids, published.encode(text))
  assert stored.decode(ids) == published.decode(ids)
  if "<" not in text:
    assert stored.decode(ids) == text


def test_long_texts_that_are_not_ascii(stored, published):
  for line in shared_data("loogle/longdep_qa.jsonl").read_text(encoding="utf-8").splitlines():
    text = json.loads(line)["input"]
    assert not text.isascii()
    ids = stored.encode(text)
    np.testing.assert_array_equal(ids, published.encode(text))
    assert stored.decode(ids) == text


def test_half_a_surrogate_pair_is_no_text(stored):
  with pytest.raises(ValueError, match="surrogates not allowed"):
    stored.encode("a\ud800")


def test_golden_prompts(stored):
  for case in json.loads(shared_data("smollm2/golden_short.json").read_text()):
    assert stored.encode(case["prompt"]).tolist() == case["prompt_ids"]
    assert stored.decode(case["greedy_ids"]) == case["text"]


def test_chat_template(stored, published):
  assert stored.has_chat_template
  default = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
  )
  user = "<|im_start|>user\nHi<|im_end|>\n"
  answer = "<|im_start|>assistant\n"
  messages = [{"role": "user", "content": "Hi"}]
  assert stored.chat_text(messages) == default + user + answer
  assert stored.chat_text(messages, prompt=False) == default + user
  system = "<|im_start|>system\nBe short.<|im_end|>\n"
  ids = stored.chat("Hi", system="Be short.")
  np.testing.assert_array_equal(ids, published.encode(system + user + answer))
  assert ids[0] == stored.token_id("<|im_start|>") == 1
  assert stored.chat("Hi").tolist() == published.encode(default + user + answer).tolist()


def test_a_vocabulary_without_chat_marks():
  tokenizers = pytest.importorskip("tokenizers")
  plain = tokenizer.Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
  assert not plain.has_chat_template
  with pytest.raises(errors.WeightsError, match="this vocabulary has no"):
    plain.chat("Hi")


def test_another_kind_of_tokenizer_is_refused():
  pytest.importorskip("tokenizers")
  fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
  with pytest.raises(
    errors.WeightsError, match=r"a\.gguf: the tokenizer stored in it is llama/def"
  ):
    tokenizer.from_gguf(fields, "a.gguf")
