import pytest

from strata_jax.pallas_kernels import mover, register_copy

WORK = {
  "fragment_bytes": 64,
  "pool_layers": 4,
  "moved_layers": 4,
  "bucket": 8,
  "to_layers": True,
  "blocks": 2,
  "loads_in_flight": 4,
}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"fragment_bytes": 24}, "Work.fragment_bytes: expected a multiple of 16, got 24"),
    ({"moved_layers": 2}, "Work.moved_layers: expected 1 or 4, got 2"),
    ({"warpgroups": 9}, "Work.warpgroups: expected an integer >= 1 and <= 8, got 9"),
    ({"loads_in_flight": 3}, "Work.loads_in_flight: expected one of 1, 2, 4, 8, got 3"),
    ({"blocks": 0}, "Work.blocks: expected an integer >= 1, got 0"),
    ({"bucket": 2**30}, "Work.bucket: expected at most 31 GiB a call"),
  ],
)
def test_work_that_cannot_be_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    mover.Work(**(WORK | change))


@pytest.mark.parametrize(
  ("fragment_bytes", "loads", "lane_wise", "slots_a_lane"),
  [
    (4096, 4, False, 1),
    (65536, 8, False, 1),
    (12288, 8, False, 1),
    (2048, 4, False, 1),
    (2048, 8, False, 2),
    (512, 4, False, 4),
    (512, 8, False, 8),
    (768, 4, True, 4),  # 48 units: a warp of 32 lanes crosses fragments
    (256, 8, True, 4),
    (6144, 8, True, 4),  # 384 units: a tile of 256 crosses fragments
    (6144, 4, False, 1),
  ],
)
def test_slots_are_looked_up_once_where_lanes_share_a_fragment(
  fragment_bytes, loads, lane_wise, slots_a_lane
):
  copy = register_copy.RegisterCopy(
    fragment_bytes=fragment_bytes,
    pool_layers=4,
    moved_layers=4,
    to_layers=True,
    loads_in_flight=loads,
  )
  assert copy.lane_wise is lane_wise
  assert copy.slots_a_lane == slots_a_lane
