"""The contract of page stores over every store, and the URLs that name them."""

import pytest

from strata_jax.tiers import faulty_store, page_store
from strata_jax.tiers.faulty_store import damage
from tests.tiers.page_store_contract import Medium, PageStoreContract
from tests.tiers.store_pages import keys_of, page_of


class TestMemoryStore(PageStoreContract):
  @pytest.fixture
  def medium(self):
    medium = Medium("memory://", kind="memory", lasts=False)
    yield medium
    medium.close()


class TestOrbaxSegments(PageStoreContract):
  @pytest.fixture
  def medium(self, tmp_path):
    medium = Medium(str(tmp_path / "store"), kind="segments")
    yield medium
    medium.close()


class TestTensorStorePages(PageStoreContract):
  @pytest.fixture
  def medium(self, tmp_path):
    medium = Medium(f"file://{tmp_path}/store/", kind="values")
    yield medium
    medium.close()


@pytest.mark.parametrize(
  "url", ["{not json", '{"driver": "no_such_driver"}', "nosuch://place/", "orbax://"]
)
def test_a_url_that_names_nothing_is_refused(url):
  with pytest.raises(ValueError, match=r".+"):
    page_store.open_store(url, page_bytes=64, fingerprint="")


def test_page_of_tells_keys_apart():
  one, two = keys_of("a", 2)
  assert (page_of(one, 64) != page_of(two, 64)).any()


def test_an_unknown_medium_cannot_be_damaged(tmp_path):
  store = page_store.open_store("memory://", page_bytes=64, fingerprint="")
  faulty = faulty_store.FaultyStore(store, faulty_store.Faults())
  with pytest.raises(TypeError, match="known medium"):
    damage(faulty, b"", "flip")
