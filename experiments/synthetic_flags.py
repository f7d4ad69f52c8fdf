"""Synthetic workloads for a real model, sized by flags."""

import dataclasses

from experiments import flags
from strata_jax import validation
from strata_jax.workloads import synthetic
from strata_jax.workloads.workload import Workload

_DOCUMENTS = {"loogle_like": synthetic.LOOGLE, "narrativeqa_like": synthetic.NARRATIVEQA}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeConfig:
  """Sizes of loogle_like and narrativeqa_like; None: as published."""

  contexts: int | None = None  # shared documents; none: as published
  context_tokens: float | None = None  # mean tokens of a document; none: as published
  queries: int | None = None  # requests, equally many a document; none: as published
  question_tokens: float | None = None  # mean tokens of a question; none: as published
  output_tokens: float | None = None  # mean tokens of an output; none: as published

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if getattr(self, field.name) is None:
        continue
      if field.name in ("contexts", "queries"):
        validation.check_int(self, field.name, minimum=1)
      else:
        validation.check_number(self, field.name, minimum=1.0)


def generate(name: str, shape: ShapeConfig, seed: int) -> Workload:
  """A workload of `synthetic`, without arrival times of its own where it has none.

  Args:
    name: one of `synthetic.GENERATORS`.
    shape: sizes other than the published ones, for documents alone.
    seed: of lengths and order.

  Raises:
    UsageError: an unknown name, or sizes for a workload that has none.
  """
  if name not in synthetic.GENERATORS:
    expected = ", ".join(synthetic.GENERATORS)
    raise flags.UsageError(f"--workload: expected one of {expected}, got {name!r}")
  sized = {key: value for key, value in dataclasses.asdict(shape).items() if value is not None}
  base = next((key for key in _DOCUMENTS if name.startswith(key)), None)
  if base is None:
    if sized:
      raise flags.UsageError(
        f"--{next(iter(sized))}: expected a workload of documents "
        f"({', '.join(_DOCUMENTS)}), got --workload={name}"
      )
    return synthetic.GENERATORS[name](seed)
  published = _DOCUMENTS[base]
  question = shape.question_tokens or published.mean_question_tokens
  context = shape.context_tokens or published.mean_input_tokens - published.mean_question_tokens
  documents = dataclasses.replace(
    published,
    contexts=shape.contexts or published.contexts,
    queries=shape.queries or published.queries,
    mean_input_tokens=context + question,
    mean_question_tokens=question,
    mean_output_tokens=shape.output_tokens or published.mean_output_tokens,
  )
  order = name.removeprefix(base).removeprefix("_") or "shuffled"
  with flags.usage_errors():
    return synthetic.documents(documents, order=order, seed=seed)
