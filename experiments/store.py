"""Looks into a store of pages, checks it, tidies it up, empties it.

  python -m experiments.store inspect --store=FOLDER
  python -m experiments.store verify --store=file:///folder/
  python -m experiments.store compact --store=FOLDER
  python -m experiments.store clear --store='{"driver": "s3", "bucket": "kv", ...}'

Works beside running servers, whatever models wrote the pages. `verify` reads everything and leaves
with status 1 when pages were bad; they are taken out, so that they are misses for everybody.
"""

import json
import sys

from experiments import flags, run_folder
from strata_jax.tiers.store_upkeep import open_upkeep

_FILE = "file://"
VERBS = ("inspect", "verify", "compact", "clear")

FLAGS = flags.FlagSet(f"{'|'.join(VERBS)}: looks after a store of pages.")
FLAGS.add_flag("verb", str | None, None, f"{', '.join(VERBS)}; may stand first without --verb=")
FLAGS.add_flag("store", str | None, None, "a folder, or a URL or JSON object of TensorStore")


def main(args: flags.Args) -> int:
  """Runs a verb. Returns 1 when bad pages were found."""
  with flags.usage_errors():
    if args.verb not in VERBS:
      raise ValueError(f"--verb: expected one of {', '.join(VERBS)}, got {args.verb!r}")
    if not args.store:
      raise ValueError("--store: expected a folder or URL, got none")
    if args.store.startswith(_FILE):
      flags.check_folder("store", args.store.removeprefix(_FILE))
    upkeep = open_upkeep(args.store)
    report = getattr(upkeep, args.verb)()
  summary = {
    "store": report.url,
    "pages": sum(holding.pages for holding in report.holdings),
    "bytes": sum(holding.bytes for holding in report.holdings),
    "bad_pages": report.bad_pages,
    "leftovers": report.leftovers,
    "holdings": report.holdings,
  }
  print(json.dumps(run_folder.plain(summary)), flush=True)
  return 1 if report.bad_pages else 0


if __name__ == "__main__":
  if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--verb={sys.argv[1]}"
  FLAGS.run(main)
