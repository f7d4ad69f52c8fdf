"""What a prefix cache of a given size would hit: replays a trace through the HiRadixTree alone.

  python -m experiments.hit_rate --trace=conversation_trace.jsonl --page_size=512 \\
    --device_tokens=5120000

No requests run and nothing takes time: each prompt is looked up and then inserted, in the order of
the trace. Reusable are whole pages, and at least one token of a prompt is always computed.
"""

import resource
import time

from experiments import flags, run_folder
from strata_jax.trace_replay import PrefixCache
from strata_jax.workloads import traces

FLAGS = flags.FlagSet("Replays a trace through the tree alone and counts what it could reuse.")
FLAGS.add_flag("trace", str | None, None, "file of the trace, or folder of its files")
FLAGS.add_flag("trace_format", str, "mooncake", f"one of {', '.join(traces.LOADERS)}")
FLAGS.add_flag("page_size", int, 16, "tokens of a page")
FLAGS.add_flag("device_tokens", str, "inf", "size of the pool, leaf-first LRU; inf: no limit")
FLAGS.add_flag("limit", int | None, None, "first requests of the trace only")
FLAGS.add_flag("repeat", int, 1, "how often the trace is replayed, one after the other")
FLAGS.add_flag("out", str, "runs/hit_rate", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  with flags.usage_errors():
    if args.trace is None:
      raise ValueError("--trace: expected a file, got none")
    pages = _pages(args.device_tokens, args.page_size)
    cache = PrefixCache(args.page_size, pages)
    for name in ("limit", "repeat"):
      value = getattr(args, name)
      if value is not None and value < 1:
        raise ValueError(f"--{name}: expected an integer >= 1, got {value}")
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": None})
  began_s = time.perf_counter()
  requests = 0
  for _ in range(args.repeat):
    with flags.usage_errors():
      trace = traces.stream(args.trace_format, args.trace, args.limit)
    for request in trace:
      cache.admit(request.prompt_ids, salt=request.salt, adapter=request.adapter)
      requests += 1
  run_folder.finish(
    out,
    {
      "requests": requests,
      "input_tokens": cache.input_tokens,
      "reusable_tokens": cache.hit_tokens,
      "hit_pages": cache.hit_tokens // args.page_size,
      "hit_ratio": cache.hit_tokens / cache.input_tokens,
      "page_size": args.page_size,
      "device_pages": pages,
      "seconds": time.perf_counter() - began_s,
      "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    },
  )


def _pages(device_tokens: str, page_size: int) -> int | None:
  """Pages of the pool; None: no limit. Raises ValueError."""
  if device_tokens == "inf":
    return None
  expected = f"--device_tokens: expected inf or an integer >= the page size {page_size}"
  try:
    tokens = int(device_tokens)
  except ValueError:
    raise ValueError(f"{expected}, got {device_tokens!r}") from None
  if tokens < page_size:
    raise ValueError(f"{expected}, got {tokens}")
  return tokens // page_size


if __name__ == "__main__":
  FLAGS.run(main)
