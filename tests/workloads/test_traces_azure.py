import pytest

from strata_jax.workloads import traces_azure
from strata_jax.workloads.trace_fields import TraceError
from tests.shared_data import shared_data

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:17:03.9799600,4808,10"


def write(tmp_path, *lines):
  path = tmp_path / "trace.csv"
  path.write_bytes("\r\n".join([HEADER, *lines]).encode())
  return path


def test_seven_fractional_digits_and_no_last_line_end(tmp_path):
  rows = traces_azure.read_rows(write(tmp_path, FIRST, "2023-11-16 18:17:04.0319605,11,2"))
  assert [row.at_ns for row in rows] == [0, 52_000_500]
  assert [(row.input_tokens, row.output_tokens) for row in rows] == [(4808, 10), (11, 2)]


def test_no_output_gives_one_token_and_a_note(tmp_path):
  workload = traces_azure.load(write(tmp_path, "2023-11-16 18:17:03,4,0"))
  assert len(workload.requests[0].forced_output_ids) == 1
  assert workload.notes["requests_without_output_given_one_token"] == 1


@pytest.mark.parametrize(
  ("line", "field"),
  [
    ("2023-11-16T18:17:04.1,5,5", "TIMESTAMP"),
    ("2023-13-16 18:17:04.1,5,5", "TIMESTAMP"),
    (",5,5", "TIMESTAMP"),
    ("nan,5,5", "TIMESTAMP"),
    ("2023-11-16 18:17:03.9799599,5,5", "TIMESTAMP"),  # earlier than the row before
    ("2023-11-16 18:17:05,0,5", "ContextTokens"),
    ("2023-11-16 18:17:05,-3,5", "ContextTokens"),
    ("2023-11-16 18:17:05,five,5", "ContextTokens"),
    ("2023-11-16 18:17:05,5,5.0", "GeneratedTokens"),
    ("2023-11-16 18:17:05,5", "row"),
    ("2023-11-16 18:17:05,5,5,5", "row"),
  ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path, line, field):
  with pytest.raises(TraceError, match=rf"trace\.csv, line 3, {field}: expected"):
    traces_azure.read_rows(write(tmp_path, FIRST, line))


def test_a_wrong_header_and_an_empty_file_are_errors(tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text("a,b,c\n")
  with pytest.raises(TraceError, match="line 1, header"):
    traces_azure.read_rows(path)
  with pytest.raises(TraceError, match="at least one row"):
    traces_azure.read_rows(write(tmp_path))


@pytest.mark.parametrize(
  ("name", "requests", "inputs", "outputs", "last_ns"),
  [
    ("code", 8_819, 18_059_974, 245_896, 3_435_948_056_000),
    ("conv", 19_366, 22_361_870, 4_088_665, 3_501_721_937_000),
  ],
)
def test_the_published_files_have_the_published_totals(name, requests, inputs, outputs, last_ns):
  rows = traces_azure.read_rows(shared_data(f"azure2023/AzureLLMInferenceTrace_{name}.csv"))
  assert len(rows) == requests
  assert sum(row.input_tokens for row in rows) == inputs
  assert sum(row.output_tokens for row in rows) == outputs
  assert rows[-1].at_ns == last_ns
