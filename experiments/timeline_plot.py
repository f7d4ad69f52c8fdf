"""Timelines as PNG: a panel a scenario, lanes of bars. Matplotlib is the extra `plots`."""

import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import run_folder, trace_events
from experiments.trace_profile import Scenario

_COLOURS = {
  trace_events.LOADS: "#d62728",
  trace_events.BACKUPS: "#9467bd",
  trace_events.GEMM: "#1f77b4",
  trace_events.ATTENTION: "#17becf",
  trace_events.OTHER: "#7f9fbf",
  trace_events.DECODE: "#2ca02c",
  trace_events.LAUNCH: "#ff7f0e",
  trace_events.WAIT: "#dddddd",
  trace_events.PLAN: "#8c564b",
  trace_events.LOOP: "#e6c229",
}
# Rows from top to bottom, and what is drawn in each.
_ROWS = (
  ("host", trace_events.HOST_LANES),
  ("compute", (trace_events.OTHER, trace_events.GEMM, trace_events.ATTENTION)),
  ("decode", (trace_events.DECODE,)),
  ("loads", (trace_events.LOADS,)),
  ("backups", (trace_events.BACKUPS,)),
)
_PIXELS = 2000  # what lies closer than one of so many parts of the axis is drawn as one bar


def draw(
  path: pathlib.Path,
  scenarios: Sequence[Scenario],
  summaries: Sequence[Mapping[str, Any]],
  title: str,
  most_steps: int,
) -> None:
  """Writes `make_figure` to a PNG; without matplotlib it says so and writes nothing."""
  try:
    figure = make_figure(scenarios, summaries, title, most_steps)
  except ImportError:
    run_folder.say(f"{path.name}: not drawn, matplotlib is not installed (extra: plots)")
    return
  figure.savefig(path, dpi=110, metadata={"Software": None})


def make_figure(
  scenarios: Sequence[Scenario],
  summaries: Sequence[Mapping[str, Any]],
  title: str,
  most_steps: int,
) -> Any:
  """A panel for every scenario.

  Args:
    scenarios: in the order of the panels.
    summaries: of each, for its title.
    title: of the figure.
    most_steps: a longer scenario is cut to so many steps, from the first one that loads.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.
  """
  figures = importlib.import_module("matplotlib.figure")
  patches = importlib.import_module("matplotlib.patches")
  figure = figures.Figure(figsize=(15, 2.1 * len(scenarios) + 1.0), layout="constrained")
  panels = figure.subplots(len(scenarios), 1, squeeze=False)[:, 0]
  for panel, scenario, summary in zip(panels, scenarios, summaries, strict=True):
    draw_panel(panel, scenario, most_steps)
    panel.set_title(_panel_title(scenario, summary), loc="left", fontsize=9)
  panels[-1].set_xlabel("ms; grey lines: a step is launched")
  handles = [patches.Patch(color=colour, label=lane) for lane, colour in _COLOURS.items()]
  figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
  figure.suptitle(title, fontsize=10)
  return figure


def draw_panel(panel: Any, scenario: Scenario, most_steps: int) -> None:
  """One scenario on matplotlib axes."""
  start_us, end_us = shown(scenario, most_steps)
  pixel_us = (end_us - start_us) / _PIXELS
  shown_rows = [
    (name, lanes)
    for name, lanes in _ROWS
    if name in ("host", "compute") or trace_events.on_lanes(scenario.events, lanes)
  ]
  for row, (_, lanes) in enumerate(shown_rows):
    for lane in lanes:
      bars = trace_events.union(trace_events.on_lanes(scenario.events, [lane]), pixel_us)
      bars = trace_events.both([(start_us, end_us)], bars)
      if bars:
        panel.broken_barh(
          [((a - start_us) / 1e3, max(b - a, pixel_us) / 1e3) for a, b in bars],
          (row - 0.4, 0.8),
          color=_COLOURS[lane],
          linewidth=0,
        )
  for step in scenario.steps:
    if start_us <= step.start_us <= end_us:
      panel.axvline((step.start_us - start_us) / 1e3, color="#888888", linewidth=0.7)
  panel.set_yticks(range(len(shown_rows)), [name for name, _ in shown_rows], fontsize=8)
  panel.set_ylim(len(shown_rows) - 0.5, -0.5)
  panel.set_xlim(0, (end_us - start_us) / 1e3)
  panel.tick_params(axis="x", labelsize=8)


def shown(scenario: Scenario, most_steps: int) -> trace_events.Interval:
  """The part of a scenario that is drawn, microseconds."""
  steps = scenario.steps
  if len(steps) <= most_steps:
    return scenario.start_us, scenario.end_us
  loads_us = [
    event.start_us
    for event in scenario.events
    if event.lane == trace_events.LAUNCH and event.args.get("load_tokens")
  ]
  # The load may have been launched alone, during the step before or ahead of all steps.
  begun = sum(step.start_us <= min(loads_us) for step in steps) if loads_us else 0
  if begun == 0:
    return scenario.start_us, steps[most_steps - 1].end_us
  first = min(begun - 1, len(steps) - most_steps)
  return steps[first].start_us, steps[first + most_steps - 1].end_us


def _panel_title(scenario: Scenario, summary: Mapping[str, Any]) -> str:
  parts = [scenario.name]
  if summary["step_ms"] is not None:
    plain_ms = summary.get("unprofiled_step_ms")
    plain = "" if plain_ms is None else f" ({plain_ms:.1f} without the profiler)"
    parts.append(f"{summary['step_ms']:.1f} ms a step{plain}")
  for label, key in (("loads", "load_overlap_share"), ("backups", "backup_overlap_share")):
    if summary[key] is not None:
      parts.append(f"{summary[key]:.0%} of the time of {label} beside compute")
  if summary["launch_hidden_share"] is not None:
    parts.append(f"{summary['launch_hidden_share']:.0%} of launching beside a busy device")
  if summary["between_steps_ms"] is not None:
    parts.append(f"{summary['between_steps_ms']:.2f} ms between steps")
  return ", ".join(parts)
