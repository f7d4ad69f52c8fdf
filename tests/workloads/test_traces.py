import pytest

from strata_jax.workloads import traces
from tests.shared_data import shared_data


@pytest.mark.parametrize(
  ("trace_format", "name"),
  [
    ("mooncake", "mooncake/conversation_trace.jsonl"),
    ("claude_code", "claude_code/trace_0504.json"),
    ("azure2023", "azure2023/AzureLLMInferenceTrace_code.csv"),
    ("loogle", "loogle/longdep_qa.jsonl"),
  ],
)
def test_every_format_loads_its_first_requests(trace_format, name):
  workload = traces.load(trace_format, shared_data(name), limit=3)
  assert [request.request_id for request in workload.requests] == [0, 1, 2]


def test_an_unknown_format_is_refused(tmp_path):
  with pytest.raises(ValueError, match="expected one of mooncake, claude_code"):
    traces.load("csv", tmp_path)
