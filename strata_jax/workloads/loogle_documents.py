"""Real LooGLE documents with their questions, as prompts `document + question`.

One JSON object a line with the fields `input` (the document), `title`, `qa_pairs`, `output`, all
strings; `qa_pairs` is a Python list written as a string (Li et al., arXiv 2311.04939).
"""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence

import numpy as np

from strata_jax.workloads import trace_fields
from strata_jax.workloads.request import Request
from strata_jax.workloads.trace_fields import MISSING, TraceError
from strata_jax.workloads.workload import TokenIds, Workload

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
  """A document with its questions; `answers[i]` belongs to `questions[i]`."""

  title: str
  text: str
  questions: tuple[str, ...]
  answers: tuple[str, ...]


def read_documents(path: pathlib.Path | str) -> list[Document]:
  """The documents of one file. Raises TraceError naming line and field."""
  path = pathlib.Path(path)
  documents: list[Document] = []
  with path.open("rb") as lines:
    for line, data in enumerate(lines, start=1):
      row = trace_fields.parse_object(data, path, line)
      for field in ("input", "title", "qa_pairs"):
        if not isinstance(row.get(field, MISSING), str) or not row.get(field):
          raise TraceError(path, line, field, "a text", row.get(field, MISSING))
      try:
        pairs = ast.literal_eval(row["qa_pairs"])
        questions = tuple(str(pair["Q"]) for pair in pairs)
        answers = tuple(str(pair["A"]) for pair in pairs)
      except (ValueError, SyntaxError, TypeError, KeyError) as error:
        expected = "a Python list of dicts with Q and A"
        raise TraceError(path, line, "qa_pairs", expected, row["qa_pairs"]) from error
      documents.append(
        Document(title=row["title"], text=row["input"], questions=questions, answers=answers)
      )
  if not documents:
    raise TraceError(path, 1, "row", "at least one document", "an empty file")
  return documents


def word_encoder() -> Encode:
  """A stand-in for a tokenizer: one id a word, sign or line break, by first appearance."""
  table: dict[str, int] = {}

  def encode(text: str) -> list[int]:
    return [table.setdefault(word, len(table)) for word in re.findall(r"\w+|[^\w\s]|\n+", text)]

  return encode


def workload(
  documents: Sequence[Document],
  *,
  encode: Encode | None = None,
  document_tokens: int | None = None,
  seed: int = 0,
  shuffle: bool = True,
) -> Workload:
  """Every question as `document + question`; the answer's length is the output length.

  `encode` gives the token ids of a text (default: `word_encoder`). Documents are cut to their first
  `document_tokens`; how many were is in the notes. Outputs are forced ids beyond those of prompts.
  """
  encode = encode or word_encoder()
  contexts: list[np.ndarray] = []
  entries: list[tuple[int, np.ndarray, int]] = []
  cut = 0
  for index, document in enumerate(documents):
    ids = np.array(encode(document.text), dtype=np.int32)
    if document_tokens is not None and len(ids) > document_tokens:
      ids = ids[:document_tokens]
      cut += 1
    contexts.append(ids)
    for question, answer in zip(document.questions, document.answers, strict=True):
      question_ids = np.array(encode("\n" + question), dtype=np.int32)
      entries.append((index, question_ids, max(1, len(encode(answer)))))
  if shuffle:
    order = np.random.default_rng(seed).permutation(len(entries))
    entries = [entries[i] for i in order]
  top = max(int(ids.max()) for ids in contexts)
  top = max([top, *(int(question_ids.max()) for _, question_ids, _ in entries)])
  outputs = TokenIds(first=top + 1)
  requests = tuple(
    Request(
      request_id=request_id, prompt_ids=np.concatenate([contexts[index], question_ids]),
      max_new_tokens=output_tokens, forced_output_ids=outputs.take(output_tokens),
    )
    for request_id, (index, question_ids, output_tokens) in enumerate(entries)
  )  # fmt: skip
  return Workload(
    name="loogle_documents",
    requests=requests,
    contexts=tuple(contexts),
    notes={"documents": len(documents), "documents_cut": cut},
  )
