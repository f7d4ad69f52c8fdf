"""Threads end with their owners, and with the interpreter."""

import gc
import queue
import subprocess
import sys
import threading

from strata_jax.executors import workers


class Owner:
  pass


def test_a_thread_ends_with_its_owner():
  jobs, got = queue.SimpleQueue(), queue.SimpleQueue()
  ended = threading.Event()

  def work(jobs, out):
    while (job := jobs.get()) is not None:
      out.put(job)
    ended.set()

  owner = Owner()
  workers.start(owner, work, jobs, got)
  jobs.put(3)
  assert got.get(timeout=10) == 3
  assert not ended.is_set()
  del owner
  gc.collect()
  assert ended.wait(10)


def test_jobs_under_way_are_waited_for_when_the_interpreter_ends():
  program = """
import queue, sys, time
from strata_jax.executors import workers

class Owner:
  pass

def work(jobs):
  while (job := jobs.get()) is not None:
    time.sleep(0.3)
    print("done", job, flush=True)

owner, jobs = Owner(), queue.SimpleQueue()
workers.start(owner, work, jobs)
jobs.put(1)
jobs.put(2)
"""
  ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert ran.stdout.splitlines() == ["done 1", "done 2"]
