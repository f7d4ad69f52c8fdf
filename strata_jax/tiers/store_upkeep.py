"""Looking into stores and tidying them up, whatever models wrote them."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from strata_jax.tiers import page_store, tensorstore_pages
from strata_jax.tiers.orbax_segments import OrbaxSegments
from strata_jax.tiers.segment_folder import SegmentFolder
from strata_jax.tiers.segment_index import load_segment

_READ_BYTES = 16 << 20
_METADATA_FILE = "_METADATA"  # Orbax's, with ours inside


@dataclasses.dataclass(kw_only=True, slots=True)
class Holding:
  """What a store holds of one model and layout."""

  fingerprint: str  # what was hashed into its name, where that was kept; else the name
  page_bytes: int
  pages: int = 0
  dead_pages: int = 0  # deleted, bad, or held twice
  bad_pages: int = 0  # found by `verify`
  segments: int = 0
  bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
  """What a store holds in all."""

  url: str
  holdings: tuple[Holding, ...]
  leftovers: int = 0  # that the next writer sweeps

  @property
  def bad_pages(self) -> int:
    return sum(holding.bad_pages for holding in self.holdings)


class Upkeep(Protocol):
  """What can be done to a store as a whole."""

  def inspect(self) -> Report:
    """Counts what is there."""
    ...

  def verify(self) -> Report:
    """Reads and checks every page. Bad ones are taken out."""
    ...

  def compact(self) -> Report:
    """Gives back all space that can be."""
    ...

  def clear(self) -> Report:
    """Deletes all pages."""
    ...


def open_upkeep(url: str) -> Upkeep:
  """The store behind a URL as `page_store.open_store` takes it.

  Raises:
    ValueError: there is none.
  """
  if url.startswith("memory://"):
    raise ValueError("store: a memory store is gone with its process, expected another URL")
  return _Values(url) if page_store.is_key_value(url) else _Segments(url)


class _Segments:
  def __init__(self, url: str):
    self.url = url
    self._folder = page_store.folder_of(url)
    if not os.path.isdir(os.path.join(self._folder, "segments")):
      raise ValueError(f"store: expected a store of segments, got {self._folder}")

  def _holdings(self) -> list[Holding]:
    found: dict[tuple[str, int], Holding] = {}
    for path in sorted(pathlib.Path(self._folder, "segments").iterdir()):
      try:
        segment = load_segment(str(path))
        text = json.loads((path / _METADATA_FILE).read_text())["custom_metadata"]["fingerprint"]
      except (OSError, ValueError, KeyError, TypeError):
        continue  # not committed, or gone meanwhile
      holding = found.setdefault(
        (text, segment.page_bytes), Holding(fingerprint=text, page_bytes=segment.page_bytes)
      )
      holding.segments += 1
      holding.bytes += segment.bytes
      holding.pages += segment.live_pages
      holding.dead_pages += segment.pages - segment.live_pages
    return list(found.values())

  def _stores(self) -> Iterator[tuple[Holding, OrbaxSegments]]:
    for holding in self._holdings():
      store = OrbaxSegments(
        self._folder, page_bytes=holding.page_bytes, fingerprint=holding.fingerprint
      )
      try:
        yield holding, store
      finally:
        store.close()

  def inspect(self) -> Report:
    folder = SegmentFolder(self._folder)
    try:
      leftovers = len(folder.leftovers())
    finally:
      folder.close()
    return Report(url=self.url, holdings=tuple(self._holdings()), leftovers=leftovers)

  def verify(self) -> Report:
    bad: dict[tuple[str, int], int] = {}
    for holding, store in self._stores():
      keys = store.list_keys()
      step = max(1, _READ_BYTES // holding.page_bytes)
      out = np.empty((step, holding.page_bytes), np.uint8)
      wrong = 0
      for start in range(0, len(keys), step):
        right = store.read(keys[start : start + step], out).result()
        wrong += int(np.count_nonzero(~right))
      bad[holding.fingerprint, holding.page_bytes] = wrong
    report = self.inspect()
    for holding in report.holdings:
      holding.bad_pages = bad.get((holding.fingerprint, holding.page_bytes), 0)
    return report

  def compact(self) -> Report:
    for _, store in self._stores():
      store.compact()
    return self.inspect()

  def clear(self) -> Report:
    for _, store in self._stores():
      store.clear()
    return self.inspect()


class _Values:
  def __init__(self, url: str):
    self.url = url
    self._kv_store = tensorstore_pages.open_kv_store(page_store.parse_spec(url))

  def _names(self) -> list[str]:
    return [name.decode() for name in self._kv_store.list().result()]

  def inspect(self) -> Report:
    return self._report(check=False)

  def verify(self) -> Report:
    return self._report(check=True)

  def _report(self, *, check: bool) -> Report:
    """The size of pages is taken from one page of each namespace, unless all are checked."""
    found: dict[str, Holding] = {}
    for name in self._names():
      namespace, _, text = name.split("/", 2) if name.count("/") == 2 else ("", "", "")
      if len(text) != 64:
        continue
      holding = found.get(namespace)
      if holding is None or check:
        value = self._kv_store.read(name).result().value
        size = len(value)
        if holding is None:
          page_bytes = max(size - tensorstore_pages.TRAILER_BYTES, 0)
          holding = found[namespace] = Holding(fingerprint=namespace, page_bytes=page_bytes)
        if check and tensorstore_pages.fault_of(bytes.fromhex(text), value):
          holding.bad_pages += 1
          self._kv_store.write(name, None).result()
          continue
      holding.pages += 1
      holding.bytes += holding.page_bytes + tensorstore_pages.TRAILER_BYTES
    return Report(url=self.url, holdings=tuple(found.values()))

  def compact(self) -> Report:
    tensorstore_pages.sweep_files(self._kv_store)  # a page that is deleted takes no space
    return self.inspect()

  def clear(self) -> Report:
    for future in [self._kv_store.write(name, None) for name in self._names()]:
      future.result()
    return self.inspect()
