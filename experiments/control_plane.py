"""What the control plane costs: match, insert and schedule beside plain numpy work.

  python -m experiments.control_plane

Ratios are times over that of `numpy.array_equal` of two arrays of the prompt's length, measured in
turn in the same run, so that they mean the same on any machine.
"""

from experiments import control_plane_schedule, control_plane_tree, flags, run_folder

FLAGS = flags.FlagSet("Times match, insert and schedule.")
FLAGS.add_flag("tokens", int, 131_072, "length of the prompt that is matched and inserted")
FLAGS.add_flag("page_size", int, 1, "tokens of a page")
FLAGS.add_flag("repeats", int, 60, "repetitions of every measurement of the tree")
FLAGS.add_flag("out", str, "runs/control_plane", "folder that the run writes")


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  with flags.usage_errors():
    for name, value in (("repeats", args.repeats), ("page_size", args.page_size)):
      if value < 1:
        raise ValueError(f"--{name}: expected an integer >= 1, got {value}")
    if args.tokens < 1 or args.tokens % (64 * args.page_size):
      raise ValueError(
        f"--tokens: expected a multiple of 64 pages of {args.page_size}, got {args.tokens}"
      )
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": None})
  tree = control_plane_tree.measure(
    tokens=args.tokens, page_size=args.page_size, repeats=args.repeats
  )
  run_folder.finish(out, tree | control_plane_schedule.measure())


if __name__ == "__main__":
  FLAGS.run(main)
