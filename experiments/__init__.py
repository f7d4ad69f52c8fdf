"""One program a question: `python -m experiments.NAME`. Flags are derived from the configs."""
