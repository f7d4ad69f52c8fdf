import numpy as np
import pytest

from strata_jax.workloads import stdlib_qa
from strata_jax.workloads.stdlib_qa import StdlibQaConfig


def _encode(text):
  return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _make(seed=0, chat=False, **sizes):
  config = StdlibQaConfig(**sizes)
  return stdlib_qa.stdlib_qa(config, encode=_encode, chat=chat, max_new_tokens=5, seed=seed)


def test_questions_share_their_files_and_nothing_more():
  workload = _make(documents=3, questions=4, document_tokens=100)
  assert len(workload.requests) == 12
  for context in workload.contexts:
    sharing = [
      r for r in workload.requests if np.array_equal(r.prompt_ids[: len(context)], context)
    ]
    assert len(sharing) == 4
    assert len({r.prompt_ids.tobytes() for r in sharing}) == 4


def test_a_file_is_cut_to_its_tokens_and_the_question_stays_whole():
  (request,) = _make(documents=1, questions=1, document_tokens=50).requests
  text = bytes(request.prompt_ids.astype(np.uint8)).decode()
  head, _, rest = text.partition(":\n")
  body, _, question = rest.rpartition("\n\n")
  assert head == f"The file {stdlib_qa.FILES[0]}"
  assert len(body) == 50
  assert question == stdlib_qa.QUESTIONS[0] + "\n"


def test_chat_marks_stand_around_file_and_question():
  (request,) = _make(documents=1, questions=1, chat=True).requests
  text = bytes(request.prompt_ids.astype(np.uint8)).decode()
  assert text.startswith("<|im_start|>user\nThe file ")
  assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_the_seed_gives_the_order():
  def prompts(seed):
    return [r.prompt_ids.tobytes() for r in _make(seed=seed, documents=4).requests]

  assert prompts(1) == prompts(1)
  assert prompts(1) != prompts(2)
  assert sorted(prompts(1)) == sorted(prompts(2))


def test_every_listed_file_is_in_this_python():
  config = StdlibQaConfig(documents=len(stdlib_qa.FILES), questions=1, document_tokens=1)
  assert len(_make(documents=config.documents, questions=1).contexts) == len(stdlib_qa.FILES)


@pytest.mark.parametrize(
  "sizes", [{"documents": 0}, {"documents": 99}, {"questions": 0}, {"document_tokens": 0}]
)
def test_impossible_sizes_are_refused(sizes):
  with pytest.raises(ValueError, match=f"StdlibQaConfig.{next(iter(sizes))}: expected"):
    StdlibQaConfig(**sizes)


def test_a_python_without_sources_is_told(monkeypatch, tmp_path):
  monkeypatch.setattr(stdlib_qa.sysconfig, "get_path", lambda name: str(tmp_path))
  with pytest.raises(
    ValueError, match=r"expected 5 source files of the standard library in .*found 0"
  ):
    _make()
