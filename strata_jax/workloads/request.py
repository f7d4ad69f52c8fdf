"""A request as a client hands it over."""

import dataclasses

import numpy as np

from strata_jax.executors.protocol import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
  """One prompt and what is wanted of it.

  `arrival_s` None: as soon as the in-flight cap allows (closed loop). `follows`: arrives `think_s`
  after that earlier request is over (multi-turn), `arrival_s` being ignored. `forced_output_ids`:
  the exact output, for simulation (its length wins over `max_new_tokens`).
  """

  request_id: int  # distinct in a run, >= 0
  prompt_ids: np.ndarray  # int32 [prompt tokens]
  max_new_tokens: int = 16
  arrival_s: float | None = None
  follows: int | None = None
  think_s: float = 0.0
  abort_s: float | None = None  # seconds after its arrival at which its client gives up
  salt: str = ""
  adapter: str = ""
  tenant: str = ""
  sampling: SamplingParams = SamplingParams()
  stop_token_ids: tuple[int, ...] = ()
  forced_output_ids: np.ndarray | None = None  # int32 [outputs]
