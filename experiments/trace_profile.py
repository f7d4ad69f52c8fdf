"""From a profile of `jax.profiler` to scenarios, steps and events on lanes.

The experiment marks what it does with `jax.profiler.TraceAnnotation`, whose names stand below and
whose keywords come back as numbers and text; so a saved profile is enough to draw it anew. What ran
on the device is told by the names of kernels, programs and streams:

- A GPU has planes `/device:GPU:N` with a line a stream, `Stream #13(Compute)`, and perhaps lines
  that a tool derived from these. Events are kernels and copies (`MemcpyH2D`), with the program
  (`hlo_module`, `program_id`) and the bytes of a copy (`memcpy_details`) among their stats.
- A CPU has no such plane. There the operations of programs, the events with a `hlo_op`, count.
"""

import collections
import gzip
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax import profiler

from experiments import trace_events
from experiments.trace_events import Event

# Annotations of the experiment.
SCENARIO, LAUNCH, WAIT, PLAN = "strata scenario", "strata launch", "strata wait", "strata plan"
_HOST_LANES = {
  LAUNCH: trace_events.LAUNCH,
  WAIT: trace_events.WAIT,
  PLAN: trace_events.PLAN,
}

_GPU = re.compile(r"^/device:GPU")
_STREAM = re.compile(r"^Stream #")
_H2D = re.compile(r"memcpy.*(h2d|htod|host to device)", re.IGNORECASE)
_D2H = re.compile(r"memcpy.*(d2h|dtoh|device to host)", re.IGNORECASE)
_COPY = re.compile(r"^memcpy", re.IGNORECASE)
_COPY_ENDS = re.compile(r"kind_src:(\w+)\s+kind_dst:(\w+)")
_HOST_KINDS = ("pageable", "pinned", "host")
_COPY_BYTES = re.compile(r"\bsize:\s*(\d+)")
# The kernel of all moves of fragments, by itself or inside the program of a layer.
_FRAGMENTS = re.compile(r"move_fragments")
# Programs that do nothing but load, or store; `jit__layer_beside_load` computes, too.
_LOAD_PROGRAM = re.compile(r"^jit_+(load(_fragments|_layer|_round)?|scatter)\b")
_STORE_PROGRAM = re.compile(r"^jit_+(store(_fragments|_layer|_round)?|gather)\b")
_ATTENTION = re.compile(r"sdpa|flash|fmha|attention|softmax", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cublas|cutlass|wgmma|matmul|ynn|(^|[^a-z])dot", re.IGNORECASE)


class Raw(NamedTuple):
  """An event as the profile has it."""

  plane: str
  line: str
  name: str
  start_us: float
  end_us: float
  stats: Mapping[str, Any]


class Step(NamedTuple):
  """A launch with compute, and the time until the next one or the end of the scenario."""

  start_us: float
  launched_us: float
  end_us: float
  args: Mapping[str, Any]

  @property
  def decodes_only(self) -> bool:
    return bool(self.args.get("decodes")) and not self.args.get("prefills")


class Scenario(NamedTuple):
  """A scenario as it ran."""

  name: str
  args: Mapping[str, Any]  # of its annotation
  start_us: float
  end_us: float
  steps: Sequence[Step]
  events: Sequence[Event]

  @property
  def marks(self) -> list[Event]:
    """The scenario and its steps as events, for a trace."""
    name = lambda number, step: f"step {step.args.get('step_id', number)}"
    return [
      Event("scenario", self.name, self.start_us, self.end_us, self.args),
      *(
        Event("step", name(number, step), step.start_us, step.end_us, step.args)
        for number, step in enumerate(self.steps)
      ),
    ]


def read(path: pathlib.Path) -> list[Raw]:
  """All events of a profile, `.xplane.pb` or `.xplane.pb.gz`.

  Raises:
    OSError: the file cannot be read.
    ValueError: it holds no profile.
  """
  data = path.read_bytes()
  if path.suffix == ".gz":
    data = gzip.decompress(data)
  try:
    profile = profiler.ProfileData.from_serialized_xspace(data)
  except Exception as error:  # whatever the parser raises
    raise ValueError(f"{path}: expected a profile (.xplane.pb), got {error}") from error
  return raw_events(profile)


def raw_events(profile: profiler.ProfileData) -> list[Raw]:
  """All events of a profile in memory."""
  with warnings.catch_warnings():
    # Of the classes of `stats`, when they are made: an error there would end the process.
    warnings.simplefilter("ignore", DeprecationWarning)
    return [
      _raw(plane.name, line.name, event)
      for plane in profile.planes
      for line in plane.lines
      for event in line.events
    ]


def _raw(plane: str, line: str, event: profiler.ProfileEvent) -> Raw:
  stats = {name: value for name, value in event.stats if name is not None}
  return Raw(plane, line, event.name, event.start_ns / 1e3, event.end_ns / 1e3, stats)


def has_gpu(raws: Sequence[Raw]) -> bool:
  """Whether there are events of a GPU."""
  return any(_GPU.match(raw.plane) for raw in raws)


def device_events(raws: Sequence[Raw]) -> list[Raw]:
  """What ran on the device: of one GPU, or the operations on a CPU."""
  planes = sorted({raw.plane for raw in raws if _GPU.match(raw.plane)})
  if not planes:
    return [raw for raw in raws if "hlo_op" in raw.stats]
  on_plane = [raw for raw in raws if raw.plane == planes[0]]
  of_streams = [raw for raw in on_plane if _STREAM.match(raw.line)]
  return of_streams or on_plane


def lane_of(raw: Raw, copy_bytes: int = 0) -> str:
  """The lane of a device event; compute that is not known by name is `other compute`.

  Args:
    raw: the event.
    copy_bytes: of the smallest copy that moves pages: smaller ones bring lists or results.
  """
  name, program = raw.name, str(raw.stats.get("hlo_module", ""))
  if _COPY.match(name):
    return _lane_of_copy(name, str(raw.stats.get("memcpy_details", "")), copy_bytes)
  if _STORE_PROGRAM.match(program):
    return trace_events.BACKUPS
  named = f"{name} {raw.stats.get('hlo_op', '')}"
  if _LOAD_PROGRAM.match(program) or _FRAGMENTS.search(named):
    return trace_events.LOADS
  if _ATTENTION.search(named):
    return trace_events.ATTENTION
  return trace_events.GEMM if _GEMM.search(named) else trace_events.OTHER


def _lane_of_copy(name: str, details: str, copy_bytes: int) -> str:
  size, ends = _COPY_BYTES.search(details), _COPY_ENDS.search(details)
  source, target = ends.groups() if ends is not None else ("", "")
  to_device = _H2D.match(name) or (source in _HOST_KINDS and target == "device")
  to_host = _D2H.match(name) or (source == "device" and target in _HOST_KINDS)
  if not to_device and not to_host:
    return trace_events.OTHER  # within the device
  if size is not None and int(size[1]) < copy_bytes:
    return trace_events.SMALL
  return trace_events.LOADS if to_device else trace_events.BACKUPS


def scenarios(raws: Sequence[Raw]) -> list[Scenario]:
  """The scenarios of a profile in the order in which they ran.

  Raises:
    ValueError: there is none.
  """
  host = sorted(
    (raw for raw in raws if raw.name in (SCENARIO, *_HOST_LANES)), key=lambda raw: raw.start_us
  )
  device = sorted(device_events(raws), key=lambda raw: raw.start_us)
  spans = [raw for raw in host if raw.name == SCENARIO]
  if not spans:
    raise ValueError(f"profile: expected annotations {SCENARIO!r}, got none")
  steps_of = [_steps(span, host) for span in spans]
  decode_programs = _decode_programs([step for steps in steps_of for step in steps], device)
  return [
    Scenario(
      name=str(span.stats.get("scenario", SCENARIO)),
      args=span.stats,
      start_us=span.start_us,
      end_us=span.end_us,
      steps=steps,
      events=(
        *_host_events(span, host),
        *_device_events(span, steps, device, decode_programs),
      ),
    )
    for span, steps in zip(spans, steps_of, strict=True)
  ]


def describe(raws: Sequence[Raw], copy_bytes: int = 0, names: int = 40) -> str:
  """What a profile holds and how it is read: planes, lines, most frequent and longest names."""
  planes: dict[str, dict[str, list[Raw]]] = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  for raw in raws:
    planes[raw.plane][raw.line].append(raw)
  text = [f"{len(raws)} events"]
  for plane, lines in planes.items():
    text.append(f"plane {plane!r}")
    for line, own in lines.items():
      first_ms = min(raw.start_us for raw in own) / 1e3
      last_ms = max(raw.end_us for raw in own) / 1e3
      span = f"from {first_ms:.3f} to {last_ms:.3f} ms"
      text.append(f"  line {line!r}: {len(own)} events, {_ms(own)}, {span}")
  device = device_events(raws)
  at_device = frozenset(map(id, device))
  host = [raw for raw in raws if id(raw) not in at_device]
  for title, own in (("device", device), ("other", host)):
    by_name: dict[str, list[Raw]] = collections.defaultdict(list)
    for raw in own:
      by_name[raw.name].append(raw)
    frequent = sorted(by_name, key=lambda name: -len(by_name[name]))[:names]
    longest = sorted(by_name, key=lambda name: -_total_us(by_name[name]))[:names]
    text.append(f"\n{title} events, {len(by_name)} names: count, total, lane, stats of the first")
    for name in (*frequent, *(name for name in longest if name not in frequent)):
      same = by_name[name]
      lane = lane_of(same[0], copy_bytes) if own is device else "-"
      text.append(
        f"  {len(same):7} {_ms(same):>14}  {lane:14} {name[:100]}  {_stats(same[0].stats)}"
      )
  return "\n".join(text) + "\n"


def smallest_copy_bytes(raws: Sequence[Raw]) -> int:
  """Of the copies that move pages, as the scenarios tell."""
  told = [int(raw.stats.get("copy_bytes", 0)) for raw in raws if raw.name == SCENARIO]
  return min((size for size in told if size), default=0)


def _total_us(raws: Iterable[Raw]) -> float:
  return sum(raw.end_us - raw.start_us for raw in raws)


def _ms(raws: Iterable[Raw]) -> str:
  return f"{_total_us(raws) / 1e3:.3f} ms"


def _stats(stats: Mapping[str, Any]) -> str:
  return ", ".join(f"{key}={str(value)[:80]}" for key, value in stats.items())


def _inside(raw: Raw, span: Raw) -> bool:
  """By the middle: the clocks of host and device may differ a little."""
  return span.start_us <= (raw.start_us + raw.end_us) / 2 <= span.end_us


def _steps(span: Raw, host: Sequence[Raw]) -> list[Step]:
  launches = [
    raw
    for raw in host
    if raw.name == LAUNCH
    and _inside(raw, span)
    and (raw.stats.get("prefills") or raw.stats.get("decodes"))
  ]
  starts_us = [*(raw.start_us for raw in launches), span.end_us]
  return [
    Step(raw.start_us, raw.end_us, end_us, raw.stats)
    for raw, end_us in zip(launches, starts_us[1:], strict=True)
  ]


def _of_step(steps: Sequence[Step], device: Sequence[Raw]) -> Iterator[tuple[Raw, Step | None]]:
  """Events, which ascend, each with the step during which it began."""
  at = -1
  ordered = sorted(steps, key=lambda step: step.start_us)
  for raw in device:
    while at + 1 < len(ordered) and ordered[at + 1].start_us <= raw.start_us:
      at += 1
    yield raw, ordered[at] if at >= 0 and raw.start_us <= ordered[at].end_us else None


def _program(raw: Raw) -> tuple[Any, Any]:
  return raw.stats.get("hlo_module"), raw.stats.get("program_id")


def _decode_programs(steps: Sequence[Step], device: Sequence[Raw]) -> frozenset[tuple[Any, Any]]:
  """Programs that ran while there were only decodes, and never while there were only prefills.

  The program of a layer has one name for all shapes, but an id for each.
  """
  decode: set[tuple[Any, Any]] = set()
  prefill: set[tuple[Any, Any]] = set()
  for raw, step in _of_step(steps, device):
    if step is not None and step.decodes_only:
      decode.add(_program(raw))
    elif step is not None and not step.args.get("decodes"):
      prefill.add(_program(raw))
  return frozenset(decode - prefill - {(None, None)})


def _host_events(span: Raw, host: Sequence[Raw]) -> list[Event]:
  """What the serving thread did; what is no annotation is the loop's own work."""
  own = [raw for raw in host if raw.name in _HOST_LANES and _inside(raw, span)]
  events = [
    Event(_HOST_LANES[raw.name], _title(raw), raw.start_us, raw.end_us, raw.stats) for raw in own
  ]
  known = trace_events.union((raw.start_us, raw.end_us) for raw in own)
  for start_us, end_us in trace_events.rest_of((span.start_us, span.end_us), known):
    events.append(Event(trace_events.LOOP, "loop", start_us, end_us, {}))
  return events


def _title(raw: Raw) -> str:
  step_id = raw.stats.get("step_id")
  kind = raw.name.removeprefix("strata ")
  return kind if step_id is None else f"step {step_id} {kind}"


def _device_events(
  span: Raw,
  steps: Sequence[Step],
  device: Sequence[Raw],
  decode_programs: frozenset[tuple[Any, Any]],
) -> list[Event]:
  copy_bytes = int(span.stats.get("copy_bytes", 0))
  events: list[Event] = []
  for raw, step in _of_step(steps, [raw for raw in device if _inside(raw, span)]):
    lane = lane_of(raw, copy_bytes)
    args = {"stream": raw.line} | {
      name: raw.stats[name]
      for name in ("hlo_module", "hlo_op", "memcpy_details")
      if name in raw.stats
    }
    if lane in trace_events.COMPUTE_LANES and step is not None:
      args["kind"] = lane
      if step.decodes_only or (step.args.get("decodes") and _program(raw) in decode_programs):
        lane = trace_events.DECODE
    events.append(Event(lane, raw.name, raw.start_us, raw.end_us, args))
  return events
