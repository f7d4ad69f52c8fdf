"""What the serve experiment tells people: a table at the end, a plot of where the time went."""

import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from strata_jax.metrics import RequestRecord


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
    ("  computed", _share(computed, prompt)),
    ("  saved", _share(prompt - computed, prompt)),
    ("output tokens", f"{summary['output_tokens']:,}"),
    ("recompilations while serving", str(summary["recompiles"])),
    ("outputs identical", _identical(summary)),
  ]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:<{width}}   {text}" for name, text in rows)


def plot_waterfall(path: pathlib.Path, records: Sequence[RequestRecord]) -> bool:
  """Draws when each request waited, computed and decoded; False without matplotlib."""
  try:
    importlib.import_module("matplotlib").use("agg")
  except ImportError:
    return False
  plt = importlib.import_module("matplotlib.pyplot")
  figure, axes = plt.subplots(figsize=(9, 1 + 0.16 * max(len(records), 6)), layout="constrained")
  parts = (
    ("waits", "arrival_s", "admitted_s", "0.8"),
    ("prefill", "admitted_s", "first_token_s", "tab:blue"),
    ("decode", "first_token_s", "over_s", "tab:green"),
  )
  for label, start, end, color in parts:
    bars = [
      (index, getattr(r, start), getattr(r, end) - getattr(r, start))
      for index, r in enumerate(records)
      if getattr(r, start) is not None and getattr(r, end) is not None
    ]
    if bars:
      rows, lefts, widths = zip(*bars, strict=True)
      axes.barh(rows, widths, left=lefts, height=0.8, color=color, label=label)
  axes.invert_yaxis()
  axes.set_xlabel("seconds since the start")
  axes.set_ylabel("request")
  axes.legend(loc="upper right", frameon=False)
  figure.savefig(path, dpi=100)
  plt.close(figure)
  return True


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
