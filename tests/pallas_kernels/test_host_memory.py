import jax
import jax.numpy as jnp

from strata_jax.pallas_kernels import host_memory


def test_a_device_view_changes_the_memory_space_of_the_type_alone():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  host = jax.device_put(jnp.arange(4.0), sharding)
  seen = []

  @jax.jit
  def view(array):
    seen.append((jax.typeof(array).memory_space, host_memory.device_view(array)))
    return jnp.float32(0)

  view(host)
  space, typed = seen[0]
  assert space == jax.memory.Space.Host
  assert jax.typeof(typed).memory_space == jax.memory.Space.Device
  assert typed.shape == host.shape


def test_a_device_array_is_its_own_view():
  array = jnp.arange(3)
  assert host_memory.device_view(array) is array
