"""Questions about source files of Python's own standard library: an agent re-reads a repository.

Every machine with Python has these documents. A prompt is a file, cut to a number of tokens, and
behind it a short question, so that all questions about one file share a long prefix.
"""

import dataclasses
import pathlib
import sysconfig
from collections.abc import Callable

import numpy as np

from strata_jax import validation
from strata_jax.executors.protocol import SamplingParams
from strata_jax.workloads.request import Request
from strata_jax.workloads.workload import Workload

# Long enough to be cut at a few thousand tokens, short enough to be readable, in every Python.
FILES = (
  "heapq.py", "shlex.py", "textwrap.py", "calendar.py", "queue.py", "fractions.py", "csv.py",
  "graphlib.py", "statistics.py", "contextlib.py", "string.py", "gzip.py", "configparser.py",
  "functools.py", "tempfile.py", "shutil.py", "zipfile/_path/__init__.py", "random.py", "copy.py",
  "bisect.py", "fnmatch.py", "glob.py", "pprint.py", "sched.py", "timeit.py", "types.py",
  "weakref.py", "selectors.py", "socketserver.py", "cmd.py", "code.py", "codeop.py",
)  # fmt: skip

QUESTIONS = (
  "What is this module for? Answer in one sentence.",
  "Name one function or class that is defined in this file and say what it does.",
  "Which exceptions can this code raise?",
  "What does this module import?",
  "How would you use this module in your own program?",
  "Which part of this file would you test first?",
  "Is there anything here that may be slow for large inputs?",
  "Write a one-line comment that describes this file.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibQaConfig:
  """How many files and questions; the order is shuffled by seed."""

  documents: int = 5  # source files of the standard library
  document_tokens: int = 1200  # a file is cut to its first so many tokens
  questions: int = 3  # questions about each file

  def __post_init__(self) -> None:
    validation.check_int(self, "documents", minimum=1, maximum=len(FILES))
    validation.check_int(self, "document_tokens", minimum=1)
    validation.check_int(self, "questions", minimum=1, maximum=len(QUESTIONS))


def stdlib_qa(
  config: StdlibQaConfig,
  *,
  encode: Callable[[str], np.ndarray],
  chat: bool,
  max_new_tokens: int,
  temperature: float = 0.0,
  seed: int = 0,
  stop_token_ids: tuple[int, ...] = (),
) -> Workload:
  """Makes the requests.

  Args:
    config: sizes.
    encode: text to token ids, int32 [tokens].
    chat: put the ChatML marks around file and question (instruction-tuned models).
    max_new_tokens: of every request.
    temperature: of every request; request i draws with `seed + i`.
    seed: of the order.
    stop_token_ids: of every request.

  Returns:
    A closed-loop workload whose `contexts` are the files.

  Raises:
    ValueError: this Python comes without the source of its standard library.
  """
  if chat:
    before, after = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
  else:
    before, after = "", "\n"
  contexts = []
  for name, text in _sources(config.documents):
    head = encode(f"{before}The file {name}:\n")
    contexts.append(np.concatenate([head, encode(text)])[: len(head) + config.document_tokens])
  tails = [encode(f"\n\n{question}{after}") for question in QUESTIONS[: config.questions]]
  pairs = [(context, tail) for context in contexts for tail in tails]
  order = np.random.default_rng(seed).permutation(len(pairs))
  requests = tuple(
    Request(
      request_id=request_id,
      prompt_ids=np.concatenate(pairs[index]),
      max_new_tokens=max_new_tokens,
      sampling=SamplingParams(temperature=temperature, seed=seed + request_id),
      stop_token_ids=stop_token_ids,
    )
    for request_id, index in enumerate(order)
  )
  return Workload(name="stdlib_qa", requests=requests, contexts=tuple(contexts))


def _sources(count: int) -> list[tuple[str, str]]:
  """The first `count` of FILES that this Python has: name, text."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  found = [name for name in FILES if (folder / name).is_file()][:count]
  if len(found) < count:
    raise ValueError(
      f"stdlib_qa: expected {count} source files of the standard library in {folder}, "
      f"found {len(found)}"
    )
  return [(name, (folder / name).read_text(encoding="utf-8")) for name in found]
