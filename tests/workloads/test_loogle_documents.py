import json

import numpy as np
import pytest

from strata_jax.workloads import loogle_documents
from strata_jax.workloads.trace_fields import TraceError
from tests.shared_data import shared_data

PAIRS = [{"Q": "who?", "A": "she did"}, {"Q": "when?", "A": "1999"}]
GOOD = {"input": "Élan vital, naïve text.", "title": "t", "qa_pairs": repr(PAIRS), "output": "none"}


def write(tmp_path, *rows):
  path = tmp_path / "docs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return path


def test_questions_share_their_document_and_answers_give_the_output_length(tmp_path):
  documents = loogle_documents.read_documents(write(tmp_path, GOOD))
  workload = loogle_documents.workload(documents, shuffle=False)
  first, second = workload.requests
  shared = len(workload.contexts[0])
  np.testing.assert_array_equal(first.prompt_ids[:shared], second.prompt_ids[:shared])
  assert first.prompt_ids.tolist() != second.prompt_ids.tolist()
  assert [r.max_new_tokens for r in workload.requests] == [2, 1]


def test_documents_are_cut_where_asked_and_the_notes_say_so(tmp_path):
  documents = loogle_documents.read_documents(write(tmp_path, GOOD, {**GOOD, "input": "short"}))
  workload = loogle_documents.workload(documents, document_tokens=3)
  assert [len(ids) for ids in workload.contexts] == [3, 1]
  assert workload.notes == {"documents": 2, "documents_cut": 1}


def test_shuffling_depends_on_the_seed_alone():
  documents = loogle_documents.read_documents(shared_data("loogle/longdep_qa.jsonl"))
  orders = [
    [len(r.prompt_ids) for r in loogle_documents.workload(documents, seed=seed).requests]
    for seed in (1, 1, 2)
  ]
  assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"input": ""}, "input"),
    ({"title": 3}, "title"),
    ({"qa_pairs": "__import__('os')"}, "qa_pairs"),
    ({"qa_pairs": "[{'Q': 'x'}]"}, "qa_pairs"),
    ({"qa_pairs": "[1"}, "qa_pairs"),
  ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path, change, field):
  with pytest.raises(TraceError, match=rf"docs\.jsonl, line 2, {field}: expected"):
    loogle_documents.read_documents(write(tmp_path, GOOD, {**GOOD, **change}))


def test_the_published_sample():
  for name, titles, questions in (("longdep_qa", 5, 43), ("shortdep_qa", 5, 80)):
    documents = loogle_documents.read_documents(shared_data(f"loogle/{name}.jsonl"))
    assert len(documents) == titles
    assert sum(len(document.questions) for document in documents) == questions
