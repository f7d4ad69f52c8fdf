"""Sweeps, declared beside the program that runs them."""

from experiments.sweeps import ablation, controls, grids, load_ratio, throughput_at_ttft
from experiments.sweeps.types import Sweep

SWEEPS: dict[str, Sweep] = {
  sweep.name: sweep
  for sweep in (
    throughput_at_ttft.SWEEP,
    *ablation.SWEEPS,
    load_ratio.SWEEP,
    controls.SWEEP,
    *grids.SWEEPS,
  )
}
