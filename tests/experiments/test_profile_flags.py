import shutil

import pytest

from experiments import flags, profile_flags
from strata_jax import profile


def _load(*argv):
  flag_set = flags.FlagSet("A test.")
  profile_flags.add(flag_set)
  return profile_flags.load(flag_set.parse(argv)).name


@pytest.fixture
def folder(tmp_path):
  for name in ("gh200_llama31_8b", "hardware_gh200"):
    shutil.copy(profile.FOLDER / f"{name}.json", tmp_path)
  return tmp_path


def test_a_folder_with_one_profile_gives_its_name(folder):
  assert _load(f"--profile_folder={folder}") == "gh200_llama31_8b"
  assert _load() == "h200_llama31_8b"
  assert _load("--profile=h200_qwen3_32b") == "h200_qwen3_32b"


def test_mistakes_name_the_flag(folder, tmp_path):
  shutil.copy(folder / "gh200_llama31_8b.json", folder / "gh200_other.json")
  with pytest.raises(flags.UsageError, match=r"--profile: expected one of gh200_ll.*gh200_other,"):
    _load(f"--profile_folder={folder}")
  with pytest.raises(flags.UsageError, match=r"^profile: expected one of .*, got 'x'"):
    _load(f"--profile_folder={folder}", "--profile=x")
  (tmp_path / "empty").mkdir()
  with pytest.raises(flags.UsageError, match="--profile_folder: expected a folder of profiles"):
    _load(f"--profile_folder={tmp_path / 'empty'}")
  with pytest.raises(flags.UsageError, match="--profile_folder: expected a folder, got /nowhere"):
    _load("--profile_folder=/nowhere")
