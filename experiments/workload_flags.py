"""Flags that name a workload and its arrivals, shared by the simulation's experiments."""

from experiments import flags
from strata_jax.workloads import arrivals, synthetic, traces
from strata_jax.workloads.workload import Workload


def add(flag_set: flags.FlagSet, *, with_arrivals: bool = True) -> None:
  """Adds the flags; without those of arrivals where an experiment makes its own."""
  names = ", ".join(synthetic.GENERATORS)
  flag_set.add_flag("workload", str, "loogle_like", f"one of {names}")
  flag_set.add_flag("trace", str | None, None, "file or folder, in the place of --workload")
  flag_set.add_flag(
    "trace_format", str, "mooncake", f"of --trace: one of {', '.join(traces.LOADERS)}"
  )
  flag_set.add_flag("limit", int | None, None, "first requests of the workload only")
  flag_set.add_flag("seed", int, 0, "of the workload and of arrivals")
  if with_arrivals:
    add_arrivals(flag_set)


def add_arrivals(flag_set: flags.FlagSet) -> None:
  """Adds the flags of arrivals alone."""
  flag_set.add_flag(
    "arrivals", str | None, None,
    f"one of {', '.join(arrivals.KINDS)}; default: poisson with a rate, else the workload's own",
  )  # fmt: skip
  flag_set.add_flag("request_rate", float | None, None, "requests a second")
  flag_set.add_flag("burst_requests", int, 16, "requests of a burst, for --arrivals=burst")
  flag_set.add_flag("arrival_speedup", float, 1.0, "the workload's own arrivals, so much denser")


def workload(args: flags.Args, *, with_arrivals: bool = True) -> Workload:
  """What the flags describe. Raises ValueError for what cannot be."""
  if args.limit is not None and args.limit < 1:
    raise ValueError(f"--limit: expected an integer >= 1, got {args.limit}")
  if args.seed < 0:
    raise ValueError(f"--seed: expected an integer >= 0, got {args.seed}")
  if args.trace is None and args.given("trace_format"):
    raise ValueError(f"--trace_format: expected --trace beside it, got {args.trace_format} alone")
  if args.trace is not None:
    found = traces.load(args.trace_format, args.trace, args.limit)
  else:
    if args.workload not in synthetic.GENERATORS:
      expected = ", ".join(synthetic.GENERATORS)
      raise ValueError(f"--workload: expected one of {expected}, got {args.workload!r}")
    found = synthetic.GENERATORS[args.workload](args.seed)
    if args.limit is not None:
      found = found.with_requests(found.requests[: args.limit])
  return set_arrivals(found, args) if with_arrivals else found


def set_arrivals(found: Workload, args: flags.Args) -> Workload:
  """The workload with the arrivals that the flags describe; `seed` is a flag, too.

  Raises ValueError for what cannot be.
  """
  rate = args.request_rate
  kind = args.arrivals or ("trace" if rate is None else "poisson")
  if kind not in arrivals.KINDS:
    raise ValueError(f"--arrivals: expected one of {', '.join(arrivals.KINDS)}, got {kind!r}")
  if kind in ("closed", "trace"):
    if rate is not None:
      raise ValueError(f"--request_rate: expected none with --arrivals={kind}, got {rate}")
    if kind == "closed":
      return arrivals.closed(found)
    return arrivals.speed_up(found, args.arrival_speedup)
  if rate is None:
    raise ValueError(f"--request_rate: expected a rate with --arrivals={kind}, got none")
  if kind == "poisson":
    return arrivals.poisson(found, rate, args.seed)
  if kind == "fixed":
    return arrivals.fixed(found, rate)
  return arrivals.burst(found, rate, args.burst_requests)
