"""Shows what runs beside what: a few steps of the JAX executor under JAX's profiler.

  XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" \\
    python -m experiments.timeline  # compiles in seconds
  python -m experiments.timeline --scenarios=kernel/layer,serving --load_tokens=16384
  python -m experiments.timeline --from_profile=runs/timeline/profile.xplane.pb.gz  # draws it anew

Scenarios: `IO/OVERLAP` (such as `kernel/layer`): a prefill behind a context that is loaded by that
I/O back end, layer by layer or as a whole; `bubble`: decode steps while a load of a parked request
runs; `backup`: a backup beside a prefill; `serving`: the serving loop with the Python between its
steps. Without a GPU a tiny model shows that all of it runs: a CPU has no streams, and its loads
layer by layer are part of the layers' own programs.

Writes `timeline.png`, `trace.json.gz` (for ui.perfetto.dev), `summary.json`, `lines.txt` (what the
profile holds and how it was read) and `profile.xplane.pb.gz` to --out. A profiler slows launching
down, and XLA then runs no command buffers: `unprofiled_*` are measured before it starts.
"""

import gzip
import pathlib
import tempfile
from typing import Any

import jax

from experiments import (
  flags,
  model_bench,
  run_folder,
  timeline_plot,
  timeline_scenarios,
  trace_events,
  trace_profile,
  trace_summary,
)
from experiments.timeline_scenarios import TINY, TimelineConfig
from strata_jax import config as config_lib
from strata_jax.models import random

_LARGE_BYTES = 16 << 20  # of a profile: slow to read and to send

FLAGS = flags.FlagSet("Traces a few steps of the JAX executor: loads, compute, decode, backups.")
FLAGS.add(TimelineConfig)
FLAGS.add_flag(
  "from_profile", str | None, None, "a saved profile to read instead of running anything"
)
FLAGS.add_flag("shown_steps", int, 6, "steps of a scenario in the picture at most")
FLAGS.add_flag(
  "out", str, "runs/timeline", "folder that the run writes; of a saved profile: its own"
)


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if args.shown_steps < 1:
    raise flags.UsageError(f"--shown_steps: expected at least 1, got {args.shown_steps}")
  if args.from_profile is not None:
    run_folder.finish(*_from_profile(args))
    return
  config, out = model_bench.begin(args, "timeline", TimelineConfig, TINY)
  with flags.usage_errors():
    params = random.random_params(config_lib.MODELS[config.model], config.seed)
    scenarios = timeline_scenarios.make(config, jax.block_until_ready(params))
  for scenario in scenarios:
    run_folder.say(f"compiles and measures {scenario.name}")
    scenario.prepare()
  profile = record(scenarios)
  (out / "profile.xplane.pb.gz").write_bytes(gzip.compress(profile, mtime=0))
  run_folder.say(f"the profile has {len(profile):,} bytes")
  if len(profile) > _LARGE_BYTES:
    run_folder.say("that is large: fewer --steps, --copied_steps or --load_tokens make it smaller")
  raws = trace_profile.read(out / "profile.xplane.pb.gz")
  if jax.default_backend() == "gpu" and not trace_profile.has_gpu(raws):
    run_folder.say(
      "the profile knows nothing of the GPU: CUPTI is missing, or may not be used here"
    )
  run_folder.finish(out, write(out, raws, args.shown_steps))


def _from_profile(args: flags.Args) -> tuple[pathlib.Path, dict[str, Any]]:
  """The folder and the summary of a saved profile, drawn beside it if no folder is named."""
  source = pathlib.Path(args.from_profile)
  with flags.usage_errors():
    raws = trace_profile.read(source)
    out = pathlib.Path(args.out) if args.given("out") else source.parent
    if not (out / "config.json").exists():  # else it tells of the run that made the profile
      out = run_folder.open_run(out, {"from_profile": str(source)})
    return out, write(out, raws, args.shown_steps)


def record(scenarios: list[timeline_scenarios.Scenario]) -> bytes:
  """The profile of all scenarios, each run once; a serialised XSpace."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # annotations tell enough
  options.host_tracer_level = 1
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      for scenario in scenarios:
        scenario.record()
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    return path.read_bytes()


def write(out: pathlib.Path, raws: list[trace_profile.Raw], shown_steps: int) -> dict[str, Any]:
  """Writes the picture, the trace and what the profile holds; returns the summary."""
  copy_bytes = trace_profile.smallest_copy_bytes(raws)
  (out / "lines.txt").write_text(trace_profile.describe(raws, copy_bytes), encoding="utf-8")
  found = trace_profile.scenarios(raws)
  rows = [trace_summary.summarize(scenario) for scenario in found]
  device = sorted({raw.plane for raw in trace_profile.device_events(raws)})
  title = f"Steps of the JAX executor, device events from {', '.join(device) or 'nowhere'}"
  trace_events.write_chrome_trace(
    out / "trace.json.gz",
    [event for scenario in found for event in scenario.events],
    [mark for scenario in found for mark in scenario.marks],
    title,
  )
  timeline_plot.draw(out / "timeline.png", found, rows, title, shown_steps)
  run_folder.say(trace_summary.table(rows))
  return {"device_planes": device, "scenarios": rows}


if __name__ == "__main__":
  FLAGS.run(main)
