import pytest

from strata_jax.pallas_kernels import mover, register_copy

WORK = {
  "fragment_bytes": 64,
  "pool_layers": 4,
  "moved_layers": 4,
  "bucket": 8,
  "to_layers": True,
  "blocks": 2,
}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"fragment_bytes": 24}, "Work.fragment_bytes: expected a multiple of 16, got 24"),
    ({"moved_layers": 2}, "Work.moved_layers: expected 1 or 4, got 2"),
    ({"warpgroups": 9}, "Work.warpgroups: expected an integer >= 1 and <= 8, got 9"),
    ({"blocks": 0}, "Work.blocks: expected an integer >= 1, got 0"),
    ({"bucket": 2**30}, "Work.bucket: expected at most 31 GiB a call"),
  ],
)
def test_work_that_cannot_be_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    mover.Work(**(WORK | change))


@pytest.mark.parametrize(
  ("fragment_bytes", "lane_wise", "slots_a_lane"),
  [
    (4096, False, 1),
    (65536, False, 1),
    (12288, False, 1),
    (2048, False, 2),
    (512, False, 8),
    (768, True, 4),  # 48 units: a warp of 32 lanes crosses fragments
    (256, True, 4),
    (6144, True, 4),  # 384 units: a tile of 256 crosses fragments
  ],
)
def test_slots_are_looked_up_once_where_lanes_share_a_fragment(
  fragment_bytes, lane_wise, slots_a_lane
):
  copy = register_copy.RegisterCopy(
    fragment_bytes=fragment_bytes, pool_layers=4, moved_layers=4, to_layers=True
  )
  assert copy.lane_wise is lane_wise
  assert copy.slots_a_lane == slots_a_lane
