"""What a traced scenario shows, in numbers: what ran beside what, and what waited for the host."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments import trace_events
from experiments.trace_events import both, on_lanes, rest_of, total_us
from experiments.trace_profile import Scenario


def summarize(scenario: Scenario) -> dict[str, Any]:
  """Times of a scenario in ms, shares from 0 to 1; None where there is nothing to divide by.

  `*_busy_ms`: time in which at least one such event ran. `load_overlap_share`: of the time in which
  loads ran, the part in which compute ran too. `launch_hidden_share`: of the time in which steps
  were launched, the part in which the device had something to do. `between_steps_ms`: from the end
  of what the device did before to the first compute of the next step. `idle_host_busy_ms`: the
  device did nothing while the host was launching, planning or looping; `idle_host_waits_ms`:
  while it waited for the device.
  """
  window = (scenario.start_us, scenario.end_us)
  lanes = lambda *names: on_lanes(scenario.events, names)
  loads, backups = lanes(trace_events.LOADS), lanes(trace_events.BACKUPS)
  compute = lanes(*trace_events.COMPUTE_LANES)
  device = lanes(*trace_events.DEVICE_LANES)
  launch, wait = lanes(trace_events.LAUNCH), lanes(trace_events.WAIT)
  idle = rest_of(window, device)
  beside = both(loads, compute)
  gaps_us = _between_steps_us(scenario)
  launches_us = [step.launched_us - step.start_us for step in scenario.steps]
  steps_us = [step.end_us - step.start_us for step in scenario.steps]
  return {
    "scenario": scenario.name,
    **{key: value for key, value in scenario.args.items() if key != "scenario"},
    "traced_steps": len(scenario.steps),
    "window_ms": _ms(window[1] - window[0]),
    "step_ms": _median_ms(steps_us),
    "launch_ms": _median_ms(launches_us),
    "load_busy_ms": _ms(total_us(loads)),
    "backup_busy_ms": _ms(total_us(backups)),
    "compute_busy_ms": _ms(total_us(compute)),
    "gemm_ms": _ms(total_us(lanes(trace_events.GEMM))),
    "attention_ms": _ms(total_us(lanes(trace_events.ATTENTION))),
    "other_compute_ms": _ms(total_us(lanes(trace_events.OTHER))),
    "decode_ms": _ms(total_us(lanes(trace_events.DECODE))),
    "load_overlap_ms": _ms(total_us(beside)),
    "load_overlap_share": _share(total_us(beside), total_us(loads)),
    "backup_overlap_share": _share(total_us(both(backups, compute)), total_us(backups)),
    "launch_hidden_share": _share(total_us(both(launch, device)), total_us(launch)),
    "between_steps_ms": _median_ms(gaps_us),
    "between_steps_total_ms": _ms(sum(gaps_us)),
    "device_idle_ms": _ms(total_us(idle)),
    "idle_host_busy_ms": _ms(total_us(both(idle, rest_of(window, wait)))),
    "idle_host_waits_ms": _ms(total_us(both(idle, wait))),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The most telling columns, for people."""
  columns = (
    ("step ms", "step_ms"),
    ("loads", "load_busy_ms"),
    ("compute", "compute_busy_ms"),
    ("overlap", "load_overlap_share"),
    ("launch ms", "launch_ms"),
    ("hidden", "launch_hidden_share"),
    ("between", "between_steps_ms"),
    ("idle", "device_idle_ms"),
  )
  text = [f"{'scenario':20}" + "".join(f"{title:>11}" for title, _ in columns)]
  for row in rows:
    cells = ["-" if row[key] is None else f"{row[key]:.3f}" for _, key in columns]
    text.append(f"{row['scenario']:20}" + "".join(f"{cell:>11}" for cell in cells))
  return "\n".join(text)


def _between_steps_us(scenario: Scenario) -> list[float]:
  """For every step but the first: how long the device had nothing to do before its compute."""
  device = [e for e in scenario.events if e.lane in trace_events.DEVICE_LANES]
  device.sort(key=lambda event: event.start_us)
  gaps_us = []
  for step in scenario.steps[1:]:
    before = [e.end_us for e in device if e.start_us < step.start_us]
    first = next(
      (e for e in device if e.start_us >= step.start_us and e.lane in trace_events.COMPUTE_LANES),
      None,
    )
    if before and first is not None:
      busy = on_lanes(device, trace_events.DEVICE_LANES)
      gap = rest_of((min(max(before), first.start_us), first.start_us), busy)
      gaps_us.append(total_us(gap))
  return gaps_us


def _ms(us: float) -> float:
  return us / 1e3


def _median_ms(values_us: Sequence[float]) -> float | None:
  return statistics.median(values_us) / 1e3 if values_us else None


def _share(part: float, whole: float) -> float | None:
  return part / whole if whole else None
