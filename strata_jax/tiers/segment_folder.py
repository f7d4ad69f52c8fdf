"""The folder that holds segments, possibly shared by several processes.

  segments/WRITER-NUMBER    committed segments, and what Orbax has not committed yet
  trash/                    segments on their way out
  writers/WRITER            one file an open store; its lock is the kernel's, gone with the process

Nobody waits for a lock: the locks only tell whether a writer still lives, so that what a dead one
left behind can be swept, and keep two compactions apart. Renames are atomic; a reader that finds a
segment gone looks at the folder again.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time

_SEGMENT = re.compile(r"([0-9a-f]{12})-[0-9a-f]{8}")
_MARKER = "strata-segments.json"
_MARKER_TEXT = '{"format": "strata-segments", "version": 1}\n'
_SETTLE_S = 0.05  # time stamps of folders are this coarse at worst
log = logging.getLogger(__name__)


def try_lock(fd: int) -> bool:
  """Takes the kernel's lock of an open file unless somebody has it."""
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


class SegmentFolder:
  """Names, leftovers and changes of a folder of segments."""

  def __init__(self, root: str):
    """Makes the folder where it is missing; `writable` tells whether it can be written.

    Raises:
      NotADirectoryError: there is a file.
      ValueError: the folder holds something else.
    """
    self.root = root
    self.segments = os.path.join(root, "segments")
    self.trash = os.path.join(root, "trash")
    self.writers = os.path.join(root, "writers")
    self.writable = True
    self._lock_fd = -1
    self._next_number = 0
    self._seen_mtime = -1
    self._noticed_s = 0.0
    self._settled = False
    marker = os.path.join(root, _MARKER)
    if os.path.exists(root) and not os.path.isdir(root):
      raise NotADirectoryError(f"store: expected a folder, got the file {root}")
    if os.path.isdir(root) and self._is_foreign():
      raise ValueError(f"store: expected an empty folder or a store of segments, got {root}")
    try:
      os.makedirs(root, exist_ok=True)
      if not os.path.exists(marker):  # before anything else is made
        self._write_marker(marker)
      for folder in (self.segments, self.trash, self.writers):
        os.makedirs(folder, exist_ok=True)
      self.writer = self._register()
    except OSError as error:
      if not os.path.isdir(self.segments):
        raise
      self.writable = False
      log.warning("store %s is read only: %s", root, error)

  def _is_foreign(self) -> bool:
    """Whether the folder holds something else; another process may be making it a store now."""
    others = [name for name in os.listdir(self.root) if not name.startswith(_MARKER)]
    return bool(others) and not os.path.exists(os.path.join(self.root, _MARKER))

  def _write_marker(self, marker: str) -> None:
    temporary = f"{marker}.{secrets.token_hex(4)}"
    with open(temporary, "w") as file:
      file.write(_MARKER_TEXT)
    os.replace(temporary, marker)

  def _register(self) -> str:
    """Makes this store's file among the writers and locks it."""
    while True:
      writer = secrets.token_hex(6)
      path = os.path.join(self.writers, writer)
      fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
      # A sweep may take the file for a dead writer's before it is locked: then another one.
      if try_lock(fd) and os.path.exists(path):
        self._lock_fd = fd
        return writer
      os.close(fd)

  def new_path(self) -> str:
    """Where the next segment goes."""
    self._next_number += 1
    return os.path.join(self.segments, f"{self.writer}-{self._next_number:08x}")

  def changed(self, *, force: bool = False) -> set[str] | None:
    """The names of all committed segments, or None when nothing changed since the last call."""
    mtime = os.stat(self.segments).st_mtime_ns
    now_s = time.monotonic()
    if mtime != self._seen_mtime:
      self._seen_mtime, self._noticed_s = mtime, now_s
    elif self._settled and not force:
      return None
    # A change within the same tick of the time stamp as the listing shows at a later listing.
    self._settled = now_s - self._noticed_s > _SETTLE_S
    return {name for name in os.listdir(self.segments) if _SEGMENT.fullmatch(name)}

  def discard(self, name: str) -> None:
    """Takes a segment out, at once for everybody, and deletes it. Gone already: nothing."""
    target = os.path.join(self.trash, f"{name}.{secrets.token_hex(4)}")
    try:
      os.rename(os.path.join(self.segments, name), target)
    except FileNotFoundError:
      return
    shutil.rmtree(target, ignore_errors=True)

  def discard_unfinished(self, path: str) -> None:
    """Deletes what a failed write of the segment `path` left."""
    name = os.path.basename(path)
    for entry in os.listdir(self.segments):
      if entry.startswith(name):
        shutil.rmtree(os.path.join(self.segments, entry), ignore_errors=True)

  def sync(self) -> None:
    """Makes renames in the folder of segments durable."""
    fd = os.open(self.segments, os.O_RDONLY | os.O_DIRECTORY)
    try:
      os.fsync(fd)
    finally:
      os.close(fd)

  def leftovers(self) -> list[str]:
    """Paths that no living writer will finish or delete."""
    paths = [os.path.join(self.trash, name) for name in os.listdir(self.trash)]
    dead: dict[str, bool] = {}
    for name in os.listdir(self.segments):
      if _SEGMENT.fullmatch(name):
        continue
      match = _SEGMENT.match(name)
      writer = match.group(1) if match else ""
      if writer not in dead:
        dead[writer] = not self._lives(writer)
      if dead[writer]:
        paths.append(os.path.join(self.segments, name))
    return paths

  def sweep(self) -> int:
    """Deletes leftovers and the files of dead writers; how many leftovers there were."""
    paths = self.leftovers()
    for path in paths:
      shutil.rmtree(path, ignore_errors=True)
    for writer in os.listdir(self.writers):
      self._lives(writer)
    return len(paths)

  def _lives(self, writer: str) -> bool:
    """Whether a writer has its store open; the file of a dead one is deleted."""
    path = os.path.join(self.writers, writer)
    if not writer:
      return False
    try:
      fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
      return False
    try:
      if not try_lock(fd):
        return True
      os.unlink(path)
      return False
    except FileNotFoundError:
      return False
    finally:
      os.close(fd)

  def lock_compaction(self) -> int | None:
    """A file descriptor that keeps others from compacting until it is closed, or None."""
    fd = os.open(os.path.join(self.root, "compaction"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    if try_lock(fd):
      return fd
    os.close(fd)
    return None

  def close(self) -> None:
    if self._lock_fd >= 0:
      with contextlib.suppress(OSError):  # the next sweep finds it
        os.unlink(os.path.join(self.writers, self.writer))
      os.close(self._lock_fd)
      self._lock_fd = -1
