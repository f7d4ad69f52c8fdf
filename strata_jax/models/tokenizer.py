"""Text to token ids and back, through the package `tokenizers`."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsInt

import numpy as np

from strata_jax.models import errors

_SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_CHATML = ("<|im_start|>", "<|im_end|>")
_CONTROL = 3  # GGUF token types
_USER_DEFINED = 4


class Tokenizer:
  """A tokenizer of one model. Nothing is added to a text: no BOS, no EOS.

  Special tokens that a text spells out (`<|im_start|>`) become their ids; `decode` leaves them out.
  """

  def __init__(self, backend: Any, *, default_system: str = "") -> None:
    self._backend = backend  # a tokenizers.Tokenizer
    self._default_system = default_system

  @property
  def vocab_size(self) -> int:
    return self._backend.get_vocab_size()

  @property
  def has_chat_template(self) -> bool:
    """Whether the vocabulary has the two marks of the ChatML template."""
    return all(self.token_id(mark) is not None for mark in _CHATML)

  def token_id(self, token: str) -> int | None:
    """The id of one token, or None when the vocabulary lacks it."""
    return self._backend.token_to_id(token)

  def encode(self, text: str) -> np.ndarray:
    """Token ids of a text, int32 [tokens]. Raises ValueError for halves of surrogate pairs."""
    text.encode()  # the package would raise a TypeError that names nothing
    return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """The text of token ids; bytes that are no whole character come out as U+FFFD."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

  def chat(self, user: str, *, system: str | None = None) -> np.ndarray:
    """Ids of one user turn in the ChatML template, ready for the answer, int32 [tokens]."""
    messages = [{"role": "user", "content": user}]
    if system is not None:
      messages.insert(0, {"role": "system", "content": system})
    return self.encode(self.chat_text(messages))

  def chat_text(self, messages: Sequence[Mapping[str, str]], *, prompt: bool = True) -> str:
    """Messages with `role` and `content` in the ChatML template.

    Without a system message the model's default one comes first. `prompt` opens the answer.

    Raises:
      WeightsError: this vocabulary has no ChatML marks.
    """
    if not self.has_chat_template:
      raise errors.WeightsError(f"chat template: this vocabulary has no {' and '.join(_CHATML)}")
    start, end = _CHATML
    if self._default_system and messages and messages[0]["role"] != "system":
      messages = [{"role": "system", "content": self._default_system}, *messages]
    turns = [f"{start}{turn['role']}\n{turn['content']}{end}\n" for turn in messages]
    return "".join(turns) + (f"{start}assistant\n" if prompt else "")


def from_file(path: pathlib.Path) -> Tokenizer:
  """Reads a `tokenizer.json`.

  Raises:
    WeightsError: the package is missing or the file is no tokenizer.
  """
  tokenizers = errors.optional_package("tokenizers", f"the tokenizer {path}")
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises bare Exception
    raise errors.WeightsError(f"{path}: not a tokenizer: {error}") from error
  return Tokenizer(backend)


def from_gguf(fields: Mapping[str, Any], source: str) -> Tokenizer:
  """Builds the byte-level BPE that a GGUF file stores as vocabulary and merges.

  Args:
    fields: the file's `tokenizer.*` metadata as plain values.
    source: the file's name, for errors.

  Raises:
    WeightsError: the package is missing, or the file stores another kind of tokenizer.
  """
  tokenizers = errors.optional_package("tokenizers", f"the tokenizer of {source}")
  kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
  if kind != "gpt2" or pre not in ("smollm", "gpt-2"):
    raise errors.WeightsError(
      f"{source}: the tokenizer stored in it is {kind}/{pre}, expected gpt2/smollm or gpt2/gpt-2; "
      "put the model's tokenizer.json beside it"
    )
  tokens = fields["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
  )
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  if pre == "smollm":  # each digit is a token of its own
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
  backend.pre_tokenizer = byte_level
  backend.decoder = tokenizers.decoders.ByteLevel()
  types = fields["tokenizer.ggml.token_type"]
  special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
  added = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
  backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in special])
  backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in added])
  template = fields.get("tokenizer.chat_template") or ""
  system = _SMOLLM_SYSTEM if _SMOLLM_SYSTEM in template else ""
  return Tokenizer(backend, default_system=system)
