"""Command lines of the experiments: absl flags, derived from the frozen config dataclasses.

  FLAGS = flags.FlagSet("Serves requests.")
  FLAGS.add(CacheConfig, names={"enabled": "cache"})
  FLAGS.add_flag("out", str, "runs/serve", "folder that the run writes")

  def main(args: flags.Args) -> int | None:
    cache = args.config(CacheConfig)  # validated; a bad value is answered with one line
    ...

  if __name__ == "__main__":
    FLAGS.run(main)

Every program has flag values of its own, nothing is global.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import pathlib
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags


class UsageError(Exception):
  """What the user asked for cannot be; the text is the one line they read."""


class _FileError(UsageError):
  """Begins with the name of a file, which may be that of a flag, too."""


@contextlib.contextmanager
def usage_errors() -> Generator[None]:
  """Errors of values, files and missing packages inside become a UsageError of one line.

  Only for set-up from what the user gave: inside a run such errors are bugs and keep their trace.
  """
  try:
    yield
  except OSError as error:
    named = error.filename is not None and error.strerror is not None
    if named:
      raise _FileError(f"{error.filename}: {error.strerror}") from error
    raise UsageError(str(error)) from error
  except (ValueError, ImportError, RecursionError) as error:  # the last: JSON nested too deeply
    raise UsageError(_one_line(str(error))) from error


def check_folder(flag: str, path: str | None) -> None:
  """Raises UsageError that names the flag if a folder is given and is not there."""
  if path is not None and not pathlib.Path(path).is_dir():
    raise UsageError(f"--{flag}: expected a folder, got {path}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flag:
  name: str
  kind: Any  # a type hint
  default: Any
  help: str


class FlagSet:
  """The flags of one program."""

  def __init__(self, description: str) -> None:
    self._description = description
    self._flags: dict[str, _Flag] = {}
    self._names: dict[type, dict[str, str]] = {}  # config class: field -> flag

  def add(
    self,
    config: type,
    *,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
  ) -> None:
    """Adds a flag for every field of a config dataclass.

    Name, type and default come from the field, the help from its `metadata["help"]` or from the
    comment behind it. Fields that are dataclasses themselves are left out.

    Args:
      config: a dataclass.
      names: flags that are not called as their field, by field.
      defaults: defaults that differ from the field's, by field.
      skip: fields without a flag.

    Raises:
      ValueError: a name that is taken or reserved, a field of a type that no flag can have, a
        field without any default.
    """
    names, defaults = names or {}, defaults or {}
    hints = typing.get_type_hints(config)
    comments = field_comments(config)
    taken: dict[str, str] = {}
    for field in dataclasses.fields(config):
      if field.name in skip or dataclasses.is_dataclass(hints[field.name]):
        continue
      if field.name in defaults:
        default = defaults[field.name]
      elif field.default is not dataclasses.MISSING:
        default = field.default
      elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
      else:
        raise ValueError(f"{config.__name__}.{field.name}: expected a default for its flag")
      name = names.get(field.name, field.name)
      text = field.metadata.get("help") or comments.get(field.name) or field.name.replace("_", " ")
      self.add_flag(name, hints[field.name], default, text)
      taken[field.name] = name
    self._names[config] = taken

  def add_flag(self, name: str, kind: Any, default: Any, help: str) -> None:
    """Adds one flag of the type `kind`: a type hint of numbers, text, bool, Literal, tuples of
    these, or a union of them. Raises ValueError on a taken name or another type."""
    if name in self._flags or name == "help":
      raise ValueError(f"--{name}: this flag is taken")
    _check_kind(name, kind)
    self._flags[name] = _Flag(name=name, kind=kind, default=default, help=help)

  def parse(self, argv: Sequence[str]) -> "Args":
    """Parses arguments (without the program's name).

    Raises:
      UsageError: an unknown flag, an impossible value, or an argument that is no flag.
    """
    values = self._define()
    try:
      rest = values(["experiment", *argv])
    except absl_flags.Error as error:
      raise UsageError(_one_line(str(error))) from error
    if len(rest) > 1:
      raise UsageError(f"expected flags only (--name=value), got {rest[1]!r}")
    return Args(values, self._names)

  def help_text(self) -> str:
    """All flags with their meaning and defaults."""
    lines = [self._description, ""]
    for flag in self._flags.values():
      default = "" if flag.default in (None, "", ()) else f" (default: {_text(flag.default)})"
      lines.append(f"  --{flag.name}={_kind_text(flag.kind)}{default}")
      lines.append(textwrap.fill(flag.help, 92, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)

  def in_flags(self, text: str) -> str:
    """An error of the library that begins with what a flag is called, with the flag's dashes.

    As `name: ...`, `Config.name: ...`, `name 'value': ...` or `name, name: ...`, where the flag may
    be the plural of the name.
    """
    head = re.match(r"(?:[A-Z]\w*\.)?(\w+(?:, \w+)*)(?=: | ')", text)
    names = head[1].split(", ") if head else []
    found = [flag for name in names for flag in (name, f"{name}s") if flag in self._flags]
    if head is None or len(found) != len(names):
      return text
    return ", ".join(f"--{flag}" for flag in found) + text[head.end() :]

  def run(self, main: Callable[["Args"], int | None]) -> None:
    """Parses the command line, calls `main`, and leaves the process with the status it returns.

    A UsageError ends it with one line on standard error and exit status 2.
    """
    argv = sys.argv[1:]
    program = f"experiments.{pathlib.Path(sys.argv[0]).stem}"
    if any(arg in ("--help", "-h", "-help") for arg in argv):
      print(self.help_text())
      sys.exit(0)
    try:
      status = main(self.parse(argv)) or 0
    except UsageError as error:
      text = str(error) if isinstance(error, _FileError) else self.in_flags(str(error))
      print(f"{program}: {text}", file=sys.stderr)
      sys.exit(2)
    except KeyboardInterrupt:
      print(f"{program}: interrupted", file=sys.stderr)
      status = 130
    sys.exit(status)

  def _define(self) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    for flag in self._flags.values():
      parser = _Parser(flag.kind)
      absl_flag = absl_flags.Flag(
        parser, _Serializer(), flag.name, None, flag.help, boolean=flag.kind is bool
      )
      absl_flags.DEFINE_flag(absl_flag, values)
      values.set_default(flag.name, flag.default)
    return values


class Args:
  """Parsed flags as attributes."""

  def __init__(self, values: absl_flags.FlagValues, names: Mapping[type, dict[str, str]]) -> None:
    self._values = values
    self._names = names

  def __getattr__(self, name: str) -> Any:
    return self._values[name].value

  def given(self, name: str) -> bool:
    """Whether the flag stood on the command line."""
    return bool(self._values[name].present)

  def config[T](self, config: type[T], *, base: T | None = None, **fixed: Any) -> T:
    """The config that the flags describe.

    Args:
      config: a class that was added.
      base: where its fields come from unless their flag was given on the command line.
      **fixed: fields that win over everything.

    Raises:
      UsageError: the config refuses a value; names the flag and what was expected.
    """
    names = self._names[config]
    values = {
      field: self._values[flag].value
      for field, flag in names.items()
      if base is None or self.given(flag)
    }
    values.update(fixed)
    try:
      return config(**values) if base is None else _replace(base, values)
    except ValueError as error:
      raise UsageError(_in_flags(str(error), config.__name__, names)) from error

  def as_dict(self) -> dict[str, Any]:
    """All values by flag, for `config.json`."""
    return dict(self._values.flag_values_dict())


def _replace[T](base: T, values: Mapping[str, Any]) -> T:
  return dataclasses.replace(typing.cast(Any, base), **values)


def field_comments(config: type) -> dict[str, str]:
  """The comment that stands behind each field of a dataclass, base classes included."""
  comments: dict[str, str] = {}
  for base in reversed(config.__mro__):
    if dataclasses.is_dataclass(base):
      comments.update(_own_field_comments(base))
  return comments


@functools.cache
def _own_field_comments(config: type) -> dict[str, str]:
  try:
    source = textwrap.dedent(inspect.getsource(config))
  except (OSError, TypeError):  # no source, as in an interactive definition
    return {}
  by_line = {
    token.start[0]: token.string.lstrip("# ").rstrip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline)
    if token.type == tokenize.COMMENT
  }
  body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
  return {
    node.target.id: by_line[node.end_lineno]
    for node in body
    if isinstance(node, ast.AnnAssign)
    and isinstance(node.target, ast.Name)
    and node.end_lineno in by_line
  }


class _Parser(absl_flags.ArgumentParser):
  """Text to a value of a type hint."""

  def __init__(self, kind: Any) -> None:
    self.kind = kind
    self.syntactic_help = _kind_text(kind)

  def parse(self, argument: Any) -> Any:
    if not isinstance(argument, str):  # a default
      return argument
    return parse_value(argument, self.kind)

  def flag_type(self) -> str:
    return _kind_text(self.kind)


class _Serializer(absl_flags.ArgumentSerializer):
  def serialize(self, value: Any) -> str:
    return _text(value)


_SWITCH = {"on": True, "true": True, "1": True, "yes": True}
_SWITCH |= {"off": False, "false": False, "0": False, "no": False}
_PLAIN = {int: "an integer", float: "a number", str: "text", bool: "on or off"}


def _options(kind: Any) -> tuple[Any, ...]:
  """The members of a union, or the type itself."""
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    return typing.get_args(kind)
  return (kind,)


def _check_kind(name: str, kind: Any) -> None:
  for option in _options(kind):
    if option in _PLAIN or option is type(None) or typing.get_origin(option) is typing.Literal:
      continue
    if typing.get_origin(option) is tuple and all(
      item in _PLAIN or item is Ellipsis for item in typing.get_args(option)
    ):
      continue
    raise ValueError(f"--{name}: expected a type that a flag can have, got {kind}")


def parse_value(text: str, kind: Any) -> Any:
  """The value of a type that a flag can have. Raises ValueError that says what was expected."""
  # Numbers first: "3" for `float | str` is a number.
  order = {type(None): 0, bool: 1, int: 2, float: 3, str: 5}
  for option in sorted(_options(kind), key=lambda item: order.get(item, 4)):
    with contextlib.suppress(ValueError):
      return _parse_one(text, option)
  raise ValueError(f"expected {_kind_text(kind)}")


def _parse_one(text: str, kind: Any) -> Any:
  if kind is type(None):
    if text.lower() in ("none", ""):
      return None
    raise ValueError(text)
  if kind is bool:
    if text.lower() not in _SWITCH:
      raise ValueError(text)
    return _SWITCH[text.lower()]
  if kind is int:
    return int(text.replace("_", ""))
  if kind is float:
    return float(text)
  if typing.get_origin(kind) is typing.Literal:
    choices = {str(choice): choice for choice in typing.get_args(kind)}
    if text not in choices:
      raise ValueError(text)
    return choices[text]
  if typing.get_origin(kind) is tuple:
    item = typing.get_args(kind)[0]
    return tuple(_parse_one(part.strip(), item) for part in text.split(",") if part.strip())
  return text


def _kind_text(kind: Any) -> str:
  texts = []
  for option in _options(kind):
    if option is type(None):
      texts.append("none")
    elif typing.get_origin(option) is typing.Literal:
      texts.append("one of " + ", ".join(str(choice) for choice in typing.get_args(option)))
    elif typing.get_origin(option) is tuple:
      texts.append(f"a list of {_PLAIN[typing.get_args(option)[0]].split(' ')[-1]}s, with commas")
    else:
      texts.append(_PLAIN[option])
  return " or ".join(texts)


def _text(value: Any) -> str:
  if isinstance(value, bool):
    return "on" if value else "off"
  if isinstance(value, tuple):
    return ",".join(str(item) for item in value)
  return str(value)


def _in_flags(text: str, config: str, names: Mapping[str, str]) -> str:
  """A config's own error with the flag in the place of `Config.field`."""
  for field, flag in names.items():
    text = re.sub(rf"\b{config}\.{field}\b", f"--{flag}", text)
  return _one_line(text)


def _one_line(text: str) -> str:
  return " ".join(text.split())
