"""The list of programs and systems."""

import runpy

from strata_jax import systems


def test_programs_and_systems_are_listed_with_what_they_are(capsys):
  runpy.run_module("experiments", run_name="__main__")
  lines = capsys.readouterr().out.splitlines()
  told = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
  for name in ("compare", "serve", "simulate", "store", "sweep", "throughput", *systems.SYSTEMS):
    assert len(told[name]) > 2, name
  assert not {"flags", "run_folder", "host_time"} & set(told)  # no programs
