"""Flags that name a profile, shared by what serves a measured run again."""

from experiments import flags
from strata_jax import profile
from strata_jax.profile import Profile

_OWN = "h200_llama31_8b"


def add(flag_set: flags.FlagSet) -> None:
  """Adds --profile and --profile_folder."""
  flag_set.add_flag(
    "profile", str | None, None,
    f"by name, model included; none: the only one of --profile_folder, without that {_OWN}",
  )  # fmt: skip
  flag_set.add_flag(
    "profile_folder", str | None, None, "folder of the profile; none: the package's own"
  )


def load(args: flags.Args) -> Profile:
  """The profile that the flags name. Raises UsageError."""
  flags.check_folder("profile_folder", args.profile_folder)
  folder, name = args.profile_folder or profile.FOLDER, args.profile
  if name is None and args.profile_folder is None:
    name = _OWN
  if name is None:
    known = profile.names(folder)
    if not known:
      raise flags.UsageError(f"--profile_folder: expected a folder of profiles, got {folder}")
    if len(known) > 1:
      raise flags.UsageError(f"--profile: expected one of {', '.join(known)}, got none")
    (name,) = known
  with flags.usage_errors():
    return profile.load(name, folder)
