"""Two regions of one program beside each other on a GPU.

XLA runs the programs of a device one after the other on one stream. Inside a program, regions that
carry a stream of their own do overlap, if both carry one, both become ready together and both are
awaited together, and if the program is compiled without command buffers. No loop may stand in such
a region, nor a call: XLA knows no stream for what is called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.extend import core

# For the `jax.jit` around `beside`.
COMPILER_OPTIONS = {"xla_gpu_enable_command_buffer": ""}


def beside(
  first: Callable[..., Any],
  first_args: Sequence[Any],
  second: Callable[..., Any],
  second_args: Sequence[Any],
) -> tuple[Any, Any]:
  """The results of two functions of arrays in device memory, run at the same time.

  Neither starts before the first argument of each is there; no other argument passes the barrier,
  which would be no place for an array in host memory.
  """
  heads = lax.optimization_barrier((first_args[0], second_args[0]))
  results = (
    _region(first, 1)(heads[0], *first_args[1:]),
    _region(second, 2)(heads[1], *second_args[1:]),
  )
  return lax.optimization_barrier(results)


def _region(function: Callable[..., Any], stream: int) -> Callable[..., Any]:
  return compute_on(
    _without_calls(function),
    compute_type=f"gpu_stream:{stream}",
    out_memory_spaces=jax.memory.Space.Device,
  )


def _without_calls(function: Callable[..., Any]) -> Callable[..., Any]:
  """`function` with every inner `jax.jit` inlined."""

  def inlined(*args):
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)

  return inlined


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
  for equation in jaxpr.eqns:
    operands = [read(atom) for atom in equation.invars]
    if equation.primitive.name == "jit":
      inner = equation.params["jaxpr"]
      results = _evaluate(inner.jaxpr, inner.consts, operands)
    else:
      params = equation.primitive.get_bind_params(equation.params)
      results = equation.primitive.bind(*operands, **params)
      if not equation.primitive.multiple_results:
        results = [results]
    values.update(zip(equation.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]
