"""Page-first against layer-first objects on storage: how fast they are written and read.

  python -m experiments.storage_layout
  python -m experiments.storage_layout --folder=/mnt/disk --page_sizes=16,64

Kept page-first, a page is one object; kept layer-first, it is one object a layer, as small as a
fragment. Both go through the same store of Orbax segments. Beside them stand the floor of the
machine, one plain file: written with one fsync, read with one `os.preadv` a page. All read the same
pages in the same random order, with the page cache warm and with it dropped. They take turns at
reading, a share of the pages each time, so that other work on the machine slows all of them alike.

The default shape is the share of one of eight devices in Llama-3.1-8B: with 16 tokens a page, 32
fragments of 8 KiB. The summary's fractions are those of the first page size and segment size given.
"""

import dataclasses
import hashlib
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments import flags, run_folder
from strata_jax.tiers import page_store
from strata_jax.tiers.layout import PageLayout
from strata_jax.tiers.orbax_segments import OrbaxSegments

_CALL_BYTES = 16 << 20  # read or written by one call of a store
_OBJECTS = 1 << 15  # in a store at most, for a measurement
_TURNS = 8  # in which the pages are read at most; a call's worth at least

FLAGS = flags.FlagSet("Measures page-first and layer-first objects on storage.")
FLAGS.add(
  PageLayout,
  defaults={"num_layers": 32, "kv_heads": 1, "head_dim": 128, "dtype": "bfloat16", "page_size": 16},
  skip=("page_size",),
)
FLAGS.add_flag("page_sizes", tuple[int, ...], (16, 64, 1), "tokens of a page")
FLAGS.add_flag(
  "segment_bytes", tuple[int, ...], (128 << 20, 16 << 20), "bytes of a segment at most"
)
FLAGS.add_flag("total_bytes", int, 512 << 20, "bytes written and read in a measurement")
FLAGS.add_flag("repeats", int, 3, "measurements of each kind; the median counts")
FLAGS.add_flag("folder", str | None, None, "where to measure; none: a temporary folder")
FLAGS.add_flag("seed", int, 0, "of the bytes and the order")
FLAGS.add_flag("out", str, "runs/storage_layout", "folder that the run writes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What is measured at once."""

  page_layout: PageLayout
  segment_bytes: int
  total_bytes: int
  repeats: int
  seed: int

  @property
  def pages(self) -> int:
    return max(1, self.total_bytes // self.page_layout.page_bytes)


Row = dict[str, Any]


def main(args: flags.Args) -> None:
  """Runs the experiment."""
  with flags.usage_errors():
    cases = _cases(args)
    out = run_folder.open_run(args.out, {"flags": args.as_dict(), "seed": args.seed})
  rows = []
  for case in cases:
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="storage_layout-") as folder:
      row = measure(case, pathlib.Path(folder))
    rows.append(row)
    run_folder.say(_line(row))
  _plot(out / "storage_layout.png", rows)
  first = rows[0]
  run_folder.finish(
    out,
    {
      "read_fraction_of_plain": first["page_first_read_warm_gbps"] / first["plain_read_warm_gbps"],
      "write_fraction_of_plain": first["page_first_write_gbps"] / first["plain_write_gbps"],
      "page_first_over_layer_first_read": first["page_first_read_warm_gbps"]
      / first["layer_first_read_warm_gbps"],
      "rows": rows,
    },
  )


def _cases(args: flags.Args) -> list[Case]:
  if args.repeats < 1 or args.total_bytes < 1:
    raise ValueError("--repeats, --total_bytes: expected integers >= 1")
  return [
    Case(
      page_layout=args.config(PageLayout, page_size=page_size),
      segment_bytes=segment_bytes,
      total_bytes=args.total_bytes,
      repeats=args.repeats,
      seed=args.seed,
    )
    for page_size in args.page_sizes
    for segment_bytes in args.segment_bytes
  ]


def measure(case: Case, folder: pathlib.Path) -> Row:
  """Writes and reads the pages of a case every way; medians in GB/s."""
  layout = case.page_layout
  rng = np.random.default_rng(case.seed)
  pages = rng.integers(0, 256, (case.pages, layout.page_bytes), np.uint8)
  order = rng.permutation(case.pages)
  rates: dict[str, list[float]] = {}  # bytes per second

  for repeat in range(case.repeats):
    ways = (_Plain(pages, folder / f"plain{repeat}"), *_stores(case, pages, folder, repeat))
    for way in ways:
      _time(rates, f"{way.name}_write", way.pages.nbytes, way.write)
    for cache in ("warm", "cold"):
      for way in ways:
        way.order = order[order < len(way.pages)]
        if cache == "cold":
          _drop_cache(folder)
        else:
          way.read(slice(None))  # also makes the destination's memory present
      for name, rate in _read_in_turns(ways).items():
        rates.setdefault(f"{name}_read_{cache}", []).append(rate)
    for way in ways:
      np.testing.assert_array_equal(way.out[::97], way.pages[way.order][::97])
      way.close()

  return {
    "page_size": layout.page_size,
    "page_bytes": layout.page_bytes,
    "fragment_bytes": layout.fragment_bytes,
    "num_layers": layout.num_layers,
    "segment_bytes": case.segment_bytes,
    "pages": case.pages,
    **{f"{name}_gbps": statistics.median(found) / 1e9 for name, found in rates.items()},
  }


def _time(
  rates: dict[str, list[float]], name: str, size_bytes: int, function: Callable[[], None]
) -> None:
  os.sync()  # what was written before does not slow this down
  began_s = time.perf_counter()
  function()
  rates.setdefault(name, []).append(size_bytes / (time.perf_counter() - began_s))


def _read_in_turns(ways: Sequence["_Plain | _Store"]) -> dict[str, float]:
  """Bytes per second of each way."""
  os.sync()
  turns = min(_TURNS, max(1, min(way.pages.nbytes for way in ways) // _CALL_BYTES))
  seconds = dict.fromkeys((way.name for way in ways), 0.0)
  for turn in range(turns):
    for way in ways:
      begin, end = (len(way.order) * at // turns for at in (turn, turn + 1))
      began_s = time.perf_counter()
      way.read(slice(begin, end))
      seconds[way.name] += time.perf_counter() - began_s
  return {way.name: way.pages.nbytes / seconds[way.name] for way in ways}


class _Plain:
  """One file: the least that any store of pages must do."""

  name = "plain"

  def __init__(self, pages: np.ndarray, path: pathlib.Path) -> None:
    self.pages = pages  # uint8 [pages, page_bytes]
    self.order = np.arange(len(pages))  # of reading
    self.out = np.empty_like(pages)
    self._path = path

  def write(self) -> None:
    with self._path.open("wb") as file:
      step = max(1, _CALL_BYTES // self.pages.shape[1])
      for start in range(0, len(self.pages), step):
        file.write(self.pages[start : start + step].data)
      file.flush()
      os.fsync(file.fileno())

  def read(self, part: slice) -> None:
    """Reads a part of the order."""
    page_bytes, out = self.pages.shape[1], self.out[part]
    with self._path.open("rb", buffering=0) as file:
      descriptor = file.fileno()
      for i, page in enumerate(self.order[part].tolist()):
        os.preadv(descriptor, [out[i]], page * page_bytes)

  def close(self) -> None:
    self._path.unlink()


class _Store:
  """The store, with whole pages or single fragments as its objects."""

  def __init__(self, name: str, store: page_store.PageStore, pages: np.ndarray, objects: int):
    self.name = name
    self._store = store
    self._objects = objects  # of a page
    self.pages = pages  # uint8 [pages, page_bytes]
    self.order = np.arange(len(pages))  # of reading
    self._keys = [
      [hashlib.blake2b(b"%d/%d" % (page, part), digest_size=32).digest() for part in range(objects)]
      for page in range(len(pages))
    ]
    self.out = np.empty_like(pages)

  def write(self) -> None:
    """Layer-first, all first layers come first."""
    parts = self.pages.reshape(len(self.pages), self._objects, -1)
    for part in range(self._objects):
      step = max(1, _CALL_BYTES // parts.shape[2])
      for start in range(0, len(parts), step):
        keys = [key[part] for key in self._keys[start : start + step]]
        self._store.write(keys, np.ascontiguousarray(parts[start : start + step, part]))
    self._store.flush()

  def read(self, part: slice) -> None:
    """Reads a part of the order."""
    order, out = self.order[part], self.out[part]
    out = out.reshape(len(order) * self._objects, -1)
    step = max(1, _CALL_BYTES // self.pages.shape[1])
    for start in range(0, len(order), step):
      keys = [key for page in order[start : start + step].tolist() for key in self._keys[page]]
      first = start * self._objects
      self._store.read(keys, out[first : first + len(keys)]).result()

  def close(self) -> None:
    self._store.close()


def _stores(case: Case, pages: np.ndarray, folder: pathlib.Path, repeat: int) -> Iterator[_Store]:
  layout = case.page_layout
  for name, objects in (("page_first", 1), ("layer_first", layout.num_layers)):
    store = OrbaxSegments(
      str(folder / f"{name}{repeat}"),
      page_bytes=layout.page_bytes // objects,
      fingerprint=name,
      segment_bytes=case.segment_bytes,
      linger_s=3600.0,
    )
    # Many small objects are slow: a share of the pages is enough to see how slow.
    yield _Store(name, store, pages[: max(1, _OBJECTS // objects)], objects)


def _drop_cache(folder: pathlib.Path) -> None:
  """Asks the kernel to forget the contents of all files below a folder."""
  os.sync()
  for path in folder.rglob("*"):
    if path.is_file():
      descriptor = os.open(path, os.O_RDONLY)
      os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
      os.close(descriptor)


def _line(row: Row) -> str:
  texts = [
    f"{way} " + " ".join(f"{row[f'{way}_{what}_gbps']:.2f}" for what in _WHATS) for way in _WAYS
  ]
  return (
    f"page {row['page_size']} tokens, {row['page_bytes'] >> 10} KiB, segments of "
    f"{row['segment_bytes'] >> 20} MiB; GB/s written, read warm, read cold: " + "; ".join(texts)
  )


_WHATS = ("write", "read_warm", "read_cold")
_WAYS = ("plain", "page_first", "layer_first")


def _plot(path: pathlib.Path, rows: list[Row]) -> None:
  """Bars of GB/s a case, one panel for writing and one for each kind of reading."""
  try:
    from matplotlib import figure
  except ImportError:
    run_folder.say("no plot: matplotlib is not installed (extra `plots`)")
    return
  fig = figure.Figure(figsize=(11, 4), layout="constrained")
  axes = np.atleast_1d(fig.subplots(1, len(_WHATS)))
  labels = [f"{row['page_size']} / {row['segment_bytes'] >> 20}" for row in rows]
  places = np.arange(len(rows))
  for axis, what in zip(axes, _WHATS, strict=True):
    for i, way in enumerate(_WAYS):
      axis.bar(
        places + 0.27 * (i - 1), [row[f"{way}_{what}_gbps"] for row in rows], 0.25, label=way
      )
    axis.set_title(what.replace("_", ", "))
    axis.set_xticks(places, labels, fontsize=8)
    axis.set_xlabel("page [tokens] / segment [MiB]")
    axis.set_ylabel("GB/s")
  axes[0].legend(loc="upper left")
  fig.savefig(path, dpi=120)


if __name__ == "__main__":
  FLAGS.run(main)
