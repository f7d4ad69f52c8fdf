"""Makes recorded decisions again: with the same policy, another config, or another policy.

  python -m experiments.replay --record=run.jsonl.gz
  python -m experiments.replay --record=run.jsonl.gz --policy=mine.py:schedule --deferral=off

Every recorded view is shown to the policy anew; its plan is held against the recorded one. (The
views are those that the recorded plans led to.) The first difference is shown, all are counted.
"""

import collections
import time
from typing import Any

from experiments import decisions, flags, run_folder
from strata_jax import policy_loading, recording
from strata_jax.scheduler.config import SchedulerConfig

FLAGS = flags.FlagSet("Makes recorded decisions again and compares them.")
FLAGS.add_flag("record", str, "", "file that --record of another experiment wrote")
FLAGS.add_flag("policy", str | None, None, "name, FILE.py:NAME or module:NAME; none: the recorded")
FLAGS.add_flag("out", str, "runs/replay", "folder that the run writes")
FLAGS.add(SchedulerConfig)


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  if not args.record:
    raise flags.UsageError("--record: expected a file")
  with flags.usage_errors():
    record = recording.read_record(args.record)
    config = args.config(SchedulerConfig, base=record.config)
    name = args.policy or record.policy or "strata"
    policy = policy_loading.load_policy(name, config)
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "scheduler": config})

  count = different = 0
  fields: collections.Counter[str] = collections.Counter()
  first: dict[str, Any] | None = None
  policy_s = 0.0
  rows = []
  with flags.usage_errors():
    for view, plan in record.decisions():
      began_s = time.perf_counter()
      again = policy(view)
      policy_s += time.perf_counter() - began_s
      if again != plan:
        found = decisions.differences(plan, again)
        different += 1
        fields.update(found.keys())
        row = {"decision": count, "view": decisions.describe(view), "fields": found}
        rows.append(row)
        if first is None:
          first = row
          run_folder.say(f"first difference: decision {count}, view {view.version}")
          run_folder.say("\n".join(decisions.text(found)))
      count += 1
  run_folder.write_jsonl(out / "differences.jsonl", rows)
  run_folder.say(f"{different} of {count} decisions differ")
  run_folder.finish(
    out,
    {
      "record": str(args.record),
      "policy": name,
      "recorded_policy": record.policy,
      "decisions": count,
      "different": different,
      "identical": different == 0,
      "differences_by_field": dict(sorted(fields.items())),
      "first_difference": first,
      "policy_mean_us": 1e6 * policy_s / count if count else None,
    },
  )


if __name__ == "__main__":
  FLAGS.run(main)
