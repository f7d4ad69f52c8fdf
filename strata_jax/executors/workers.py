"""Threads beside the main one, each with a queue of jobs that None ends.

A thread knows its queue but not its owner, so that the owner can be collected, which ends it. What
is still running when the interpreter ends is waited for: a thread that is cut off inside of JAX
would take the process down with it.
"""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_END_S = 10.0  # at most, for all threads together, when the interpreter ends

_running: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = (
  weakref.WeakKeyDictionary()
)


def start(
  owner: object, work: Callable[..., None], jobs: "queue.SimpleQueue[Any]", *args: Any
) -> None:
  """Runs `work(jobs, *args)` in a thread until it takes None from `jobs`.

  Args:
    owner: whose end puts that None there; `work` and `args` must not refer to it.
    work: takes jobs from the queue.
    jobs: the queue.
    *args: for `work`.
  """
  thread = threading.Thread(target=work, args=(jobs, *args), daemon=True)
  thread.start()
  _running[thread] = jobs
  weakref.finalize(owner, jobs.put, None)


@atexit.register
def end_all() -> None:
  """Ends all threads, and waits for them."""
  threads = list(_running.items())
  for _, jobs in threads:
    jobs.put(None)
  for thread, _ in threads:
    thread.join(_END_S / len(threads))
