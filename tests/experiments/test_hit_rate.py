import json

import pytest

from experiments import flags, hit_rate
from tests.shared_data import shared_data

MOONCAKE = "mooncake/conversation_trace.jsonl"


def run(tmp_path, capsys, trace, *argv):
  args = hit_rate.FLAGS.parse([f"--trace={trace}", f"--out={tmp_path}", *argv])
  hit_rate.main(args)
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert summary == json.loads((tmp_path / "summary.json").read_text())
  return summary


@pytest.mark.parametrize(
  ("limit", "page_size", "reusable"),
  [
    (50, 1, 25_088),
    (50, 512, 25_088),
    (1000, 1, 2_962_765),
    (1000, 16, 2_962_688),
    (1000, 64, 2_962_304),
    (1000, 512, 2_959_360),
  ],
)
def test_first_rows_of_the_mooncake_trace(tmp_path, capsys, limit, page_size, reusable):
  trace = shared_data(MOONCAKE)
  summary = run(tmp_path, capsys, trace, f"--limit={limit}", f"--page_size={page_size}")
  assert summary["requests"] == limit
  assert summary["reusable_tokens"] == reusable


@pytest.mark.slow
@pytest.mark.parametrize(
  ("page_size", "reusable"),
  [
    (1, 54_098_293),
    (16, 54_097_440),
    (32, 54_096_416),
    (64, 54_093_952),
    (256, 54_082_048),
    (512, 54_063_104),
  ],
)
def test_the_whole_mooncake_trace_without_a_limit(tmp_path, capsys, page_size, reusable):
  summary = run(tmp_path, capsys, shared_data(MOONCAKE), f"--page_size={page_size}")
  assert summary["requests"] == 12_031
  assert summary["input_tokens"] == 144_793_823
  assert summary["reusable_tokens"] == reusable
  assert summary["seconds"] < 90
  assert summary["peak_bytes"] < 6 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
  ("pages", "hits"),
  [
    (500, 12_165),
    (1_000, 12_990),
    (2_000, 15_944),
    (5_000, 34_193),
    (10_000, 62_005),
    (20_000, 84_692),
    (50_000, 102_724),
    (100_000, 104_926),
  ],
)
def test_bounded_pools(tmp_path, capsys, pages, hits):
  summary = run(
    tmp_path, capsys, shared_data(MOONCAKE), "--page_size=512", f"--device_tokens={512 * pages}"
  )
  assert summary["device_pages"] == pages
  assert summary["hit_pages"] == pytest.approx(hits, rel=0.01)


def test_twice_the_rows_are_twice_the_input_and_hit_all_the_second_time(tmp_path, capsys):
  trace = shared_data(MOONCAKE)
  once = run(tmp_path, capsys, trace, "--limit=50", "--page_size=1")
  twice = run(tmp_path, capsys, trace, "--limit=50", "--page_size=1", "--repeat=2")
  assert twice["input_tokens"] == 2 * once["input_tokens"]
  assert twice["requests"] == 2 * once["requests"]
  # The second time everything but the one token that is always computed.
  second = twice["reusable_tokens"] - once["reusable_tokens"]
  assert second == once["input_tokens"] - 50


def test_claude_code_reuses_what_its_blocks_say(tmp_path, capsys):
  trace = shared_data("claude_code/trace_0504.json")
  summary = run(tmp_path, capsys, trace, "--trace_format=claude_code", "--page_size=64")
  assert (summary["input_tokens"], summary["reusable_tokens"]) == (33_739, 21_952)


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--out=x"], "--trace: expected a file"),
    (["--trace=none.jsonl"], "none.jsonl"),
    (["--trace=x", "--device_tokens=3"], "--device_tokens: expected inf or an integer >="),
    (["--trace=x", "--device_tokens=many"], "--device_tokens"),
    (["--trace=x", "--page_size=0"], "page_size: expected"),
    (["--trace=x", "--trace_format=csv"], "trace_format: expected one of"),
    (["--trace=x", "--repeat=0"], "--repeat"),
    (["--trace=x", "--limit=0"], "--limit: expected an integer >= 1, got 0"),
  ],
)
def test_mistakes_get_one_line(tmp_path, monkeypatch, argv, message):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(flags.UsageError, match=message):
    hit_rate.main(hit_rate.FLAGS.parse(argv))
