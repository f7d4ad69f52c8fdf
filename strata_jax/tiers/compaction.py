"""Which segments to merge, so that dead pages and small segments do not pile up."""

from collections.abc import Collection
from typing import NamedTuple

MIN_MERGED = 4  # small segments are merged by so many at least: the work per page stays logarithmic
MIN_RECLAIMED = 0.5  # or where this share of their bytes comes back


class Candidate(NamedTuple):
  """A segment, as far as the choice needs it."""

  name: str
  pages: int
  live_pages: int
  used_s: float


def choose(
  candidates: Collection[Candidate], batch_pages: int, *, force: bool = False
) -> list[str]:
  """The names of segments whose live pages should become one segment of at most `batch_pages`.

  Only segments that are at most half full of live pages are moved, those used at about the same
  time together, so that a merged segment is as old as its pages. With `force`, whatever saves a
  segment or a dead page. Empty: nothing to gain.
  """
  hollow = [
    c for c in candidates if c.live_pages * 2 <= batch_pages or (force and c.live_pages < c.pages)
  ]
  chosen: list[Candidate] = []
  room = batch_pages
  for candidate in sorted(hollow, key=lambda c: (c.used_s, c.name)):
    if candidate.live_pages <= room:
      chosen.append(candidate)
      room -= candidate.live_pages
  pages = sum(c.pages for c in chosen)
  dead = pages - sum(c.live_pages for c in chosen)
  worth = len(chosen) >= MIN_MERGED or (dead > 0 and dead >= MIN_RECLAIMED * pages)
  if force:
    worth = len(chosen) >= 2 or dead > 0
  return [c.name for c in chosen] if worth else []
