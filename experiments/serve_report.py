"""The table that the serve experiment ends with."""

from collections.abc import Mapping
from typing import Any


def table(summary: Mapping[str, Any]) -> str:
  """The main numbers of a run, aligned."""
  prompt, computed = summary["prompt_tokens"], summary["computed_tokens"]
  rows = [
    ("requests", f"{summary['finished']} of {summary['requests']} finished"),
    ("time to first token, cold", _seconds(summary["ttft_cold_s"])),
    ("time to first token, warm", _warm(summary)),
    ("prompt tokens", f"{prompt:,}"),
    ("  hits on the device", _share(summary["device_hit_tokens"], prompt)),
    ("  hits on the host", _share(summary["host_hit_tokens"], prompt)),
    *(
      [("  hits in storage", _share(summary["storage_hit_tokens"], prompt))]
      if "store" in summary
      else []
    ),
    ("  computed", _share(computed, prompt)),
    ("  saved", _share(prompt - computed, prompt)),
    ("output tokens", f"{summary['output_tokens']:,}"),
    ("recompilations while serving", str(summary["recompiles"])),
    ("outputs identical", _identical(summary)),
  ]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:<{width}}   {text}" for name, text in rows)


def _seconds(value: float | None) -> str:
  return "-" if value is None else f"{value:.3f} s"


def _warm(summary: Mapping[str, Any]) -> str:
  text = _seconds(summary["ttft_warm_s"])
  parts = [
    f"{tier} {_seconds(summary[f'ttft_warm_{tier}_s'])}"
    for tier in ("device", "host")
    if summary[f"ttft_warm_{tier}_s"] is not None
  ]
  return f"{text} ({', '.join(parts)})" if len(parts) > 1 else text


def _share(tokens: int, total: int) -> str:
  return f"{tokens:,} ({100 * tokens / total:.1f} %)" if total else str(tokens)


def _identical(summary: Mapping[str, Any]) -> str:
  if summary["outputs_identical"] is None:
    return "not checked (--verify)"
  text = "yes" if summary["outputs_identical"] else f"NO: requests {summary['different_requests']}"
  return f"{text}, {summary['near_ties']} near ties" if summary["near_ties"] else text
