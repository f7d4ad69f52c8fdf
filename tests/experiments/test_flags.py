import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Literal

import pytest

from experiments import flags
from strata_jax import validation
from strata_jax.config import CacheConfig, ServingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Inner:
  depth: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
  count: int = 3  # how many
  share: float = 0.5
  limit: float | str = "profiled"  # a number, or "profiled"
  seconds: float | None = None  # none: no limit
  quiet: bool = False
  mode: Literal["fast", "slow"] = "fast"
  sizes: tuple[int, ...] = (1, 2)
  inner: _Inner = _Inner()
  noted: int = dataclasses.field(default=1, metadata={"help": "from the metadata"})

  def __post_init__(self) -> None:
    validation.check_int(self, "count", minimum=1)


def _flag_set() -> flags.FlagSet:
  flag_set = flags.FlagSet("A test.")
  flag_set.add(_Config, names={"quiet": "hush"})
  flag_set.add_flag("out", str, "runs/test", "folder")
  return flag_set


def test_defaults_are_those_of_the_fields():
  args = _flag_set().parse([])
  assert args.config(_Config) == _Config()
  assert args.out == "runs/test"


def test_every_type_is_parsed():
  args = _flag_set().parse(
    [
      "--count=4",
      "--share=0.25",
      "--limit=7",
      "--seconds=1.5",
      "--hush",
      "--mode=slow",
      "--sizes=4,5,6",
    ]
  )
  assert args.config(_Config) == _Config(
    count=4, share=0.25, limit=7.0, seconds=1.5, quiet=True, mode="slow", sizes=(4, 5, 6)
  )
  args = _flag_set().parse(["--limit=profiled", "--seconds=none", "--hush=off"])
  assert args.config(_Config) == _Config()


def test_switches_know_on_and_off():
  assert _flag_set().parse(["--hush=on"]).hush is True
  assert _flag_set().parse(["--nohush"]).hush is False


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--count=x", "--count=x: expected an integer"),
    ("--count=1.5", "expected an integer"),
    ("--share=x", "expected a number"),
    ("--hush=maybe", "expected on or off"),
    ("--mode=x", "expected one of fast, slow"),
    ("--sizes=1,x", "expected a list of integers"),
    ("--unknown=1", "Unknown command line flag 'unknown'"),
    ("--cuont=1", "Did you mean: count"),
    ("stray", "expected flags only .*'stray'"),
  ],
)
def test_a_bad_argument_is_answered_in_one_line(argument, message):
  with pytest.raises(flags.UsageError, match=message) as raised:
    _flag_set().parse([argument])
  assert "\n" not in str(raised.value)


def test_a_value_that_the_config_refuses_names_the_flag():
  args = _flag_set().parse(["--count=0"])
  with pytest.raises(flags.UsageError, match=r"^--count: expected an integer >= 1, got 0$"):
    args.config(_Config)


def test_a_base_gives_what_the_command_line_does_not():
  base = _Config(count=9, share=0.75)
  args = _flag_set().parse(["--share=0.5"])
  assert args.config(_Config, base=base, sizes=(7,)) == _Config(count=9, share=0.5, sizes=(7,))
  assert args.given("share")
  assert not args.given("count")


def test_help_shows_names_comments_and_defaults():
  text = _flag_set().help_text()
  for expected in (
    "--count=an integer (default: 3)",
    "how many",
    "from the metadata",
    "--mode=one of fast, slow (default: fast)",
    "--hush=on or off (default: off)",
    "--out=text (default: runs/test)",
  ):
    assert expected in text
  assert "depth" not in text


def test_real_configs_become_flags():
  flag_set = flags.FlagSet("Both.")
  flag_set.add(CacheConfig, names={"enabled": "cache"}, defaults={"page_size": 4})
  flag_set.add(ServingConfig, skip=("decode_steps",))
  args = flag_set.parse(["--cache=off", "--step_tokens=64"])
  assert args.config(CacheConfig) == CacheConfig(enabled=False, page_size=4)
  assert args.config(ServingConfig) == ServingConfig(step_tokens=64)
  assert args.as_dict()["cache"] is False


def test_flags_cannot_be_taken_twice_or_have_any_type():
  flag_set = flags.FlagSet("Twice.")
  flag_set.add(_Config)
  with pytest.raises(ValueError, match="--count: this flag is taken"):
    flag_set.add_flag("count", int, 1, "again")
  with pytest.raises(ValueError, match="--table: expected a type that a flag can have"):
    flag_set.add_flag("table", dict, {}, "no")


def test_usage_errors_become_one_line():
  with pytest.raises(flags.UsageError, match=r"^first second$"), flags.usage_errors():
    raise ValueError("first\n  second")
  with pytest.raises(flags.UsageError, match="decoding a JSON array"), flags.usage_errors():
    json.loads("[" * 100_000)
  with pytest.raises(flags.UsageError, match=r"^/nowhere: No such file"), flags.usage_errors():
    pathlib.Path("/nowhere").read_text()


def test_a_folder_that_is_not_there_names_the_flag(tmp_path):
  flags.check_folder("base", None)
  flags.check_folder("base", str(tmp_path))
  (tmp_path / "file").touch()
  for path in (tmp_path / "none", tmp_path / "file"):
    with pytest.raises(flags.UsageError, match=rf"^--base: expected a folder, got {path}$"):
      flags.check_folder("base", str(path))


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("count: expected 1", "--count: expected 1"),
    ("size: expected 1", "--sizes: expected 1"),
    ("count, mode: expected 1", "--count, --mode: expected 1"),
    ("mode 'x': expected y", "--mode 'x': expected y"),
    ("_Config.count: expected 1", "_Config.count: expected 1"),
    ("SomeConfig.count: expected 1", "--count: expected 1"),
    ("--out: expected mode: 1", "--out: expected mode: 1"),
    ("count, other: expected 1", "count, other: expected 1"),
    ("count.json: expected 1", "count.json: expected 1"),
    ("other: expected 1", "other: expected 1"),
    ("mode of some sort: expected 1", "mode of some sort: expected 1"),
  ],
)
def test_an_error_of_the_library_gets_the_dashes_of_its_flag(text, expected):
  assert _flag_set().in_flags(text) == expected


_PROGRAM = """
from experiments import flags
FLAGS = flags.FlagSet("Says hello.")
FLAGS.add_flag("name", str, "you", "whom to greet")
def main(args):
  if args.name == "nobody":
    raise flags.UsageError("name: expected somebody")
  if args.name == "file":
    with flags.usage_errors():
      open("name")
  print("hello", args.name)
FLAGS.run(main)
"""


def _program(*arguments):
  command = [sys.executable, "-c", _PROGRAM, *arguments]
  return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_program_ends_with_status_and_one_line():
  good = _program("--name=me")
  assert (good.returncode, good.stdout, good.stderr) == (0, "hello me\n", "")
  wrong = (
    ("--name=nobody", ": --name: expected somebody"), ("--name=file", ": name: No such file"),
    ("--nmae=me", "'nmae'"),
  )  # fmt: skip
  for bad, message in wrong:
    answer = _program(bad)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert message in answer.stderr
  assert "--name=text" in _program("--help").stdout


def test_an_empty_default_is_not_shown():
  program = flags.FlagSet("x")
  program.add_flag("nothing", str, "", "a text")
  program.add_flag("zero", int, 0, "a number")
  assert "default: )" not in program.help_text()
  assert "(default: 0)" in program.help_text()
