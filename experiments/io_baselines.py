"""What the kernel is compared with: driver copies of fragments, and a kernel in CUDA C++."""

import ctypes
import functools
from typing import Any

import numpy as np

from experiments import io_bench
from strata_jax.tiers import cuda_copies

# A register copy as one writes it by hand: 1,024 threads a block, a warp a fragment, four loads of
# 16 bytes in flight a lane.
_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(1024) move_fragments(
    const char* source, char* target, const int* source_slots, const int* target_slots, int count,
    int bytes) {
  int lane = threadIdx.x & 31;
  int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, warps = (gridDim.x * blockDim.x) >> 5;
  for (int i = warp; i < count; i += warps) {
    const uint4* s = (const uint4*)(source + (long long)source_slots[i] * bytes);
    uint4* d = (uint4*)(target + (long long)target_slots[i] * bytes);
    int words = bytes / 16;
    for (int first = 0; first < words; first += 128) {
      uint4 v[4];
      #pragma unroll
      for (int u = 0; u < 4; u++) {
        int k = first + u * 32 + lane;
        if (k < words)
          asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(s + k));
      }
      #pragma unroll
      for (int u = 0; u < 4; u++) {
        int k = first + u * 32 + lane;
        if (k < words)
          asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};"
                       :: "l"(d + k), "r"(v[u].x), "r"(v[u].y), "r"(v[u].z), "r"(v[u].w));
      }
    }
  }
}
"""


class CudaRegisterCopy:
  """The hand-written kernel, compiled by NVRTC; loads and stores the lists of some pools."""

  def __init__(self, side: cuda_copies.SideStream) -> None:
    nvrtc = cuda_copies.cuda_module("cuda.bindings.nvrtc")
    driver = cuda_copies.cuda_module("cuda.bindings.driver")
    self._driver, self._side = driver, side
    program = _checked(nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"move_fragments.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    module = _checked(driver.cuModuleLoadData(binary))
    self._function = _checked(driver.cuModuleGetFunction(module, b"move_fragments"))

  def submit(self, pools: io_bench.Pools, direction: str, blocks: int) -> None:
    """One launch on the side stream; pools with one layer."""
    host = (pools.host.unsafe_buffer_pointer(), pools.host_slots.unsafe_buffer_pointer())
    device = (pools.device[0].unsafe_buffer_pointer(), pools.device_slots.unsafe_buffer_pointer())
    source, target = (host, device) if direction == "load" else (device, host)
    values = (
      source[0],
      target[0],
      source[1],
      target[1],
      pools.pages,
      pools.page_layout.fragment_bytes,
    )
    types = (ctypes.c_void_p,) * 4 + (ctypes.c_int,) * 2
    _checked(
      self._driver.cuLaunchKernel(
        self._function, blocks, 1, 1, 1024, 1, 1, 0, self._side.stream, (values, types), 0
      )
    )


def driver_copies(pools: io_bench.Pools, direction: str, pages: int) -> cuda_copies.Copies:
  """One copy for each of the first `pages` pages of the lists; pools with one layer."""
  size_bytes = pools.page_layout.fragment_bytes
  parts = lambda pool, slots: cuda_copies.addresses(
    pool.unsafe_buffer_pointer(), np.asarray(slots[:pages]), size_bytes
  )
  host = parts(pools.host, pools.host_slots)
  device = parts(pools.device[0], pools.device_slots)
  sources, targets = (host, device) if direction == "load" else (device, host)
  return cuda_copies.Copies(targets=targets, sources=sources, size_bytes=size_bytes)


def driver_rate(
  pools: io_bench.Pools,
  direction: str,
  submit: cuda_copies.Submit,
  side: cuda_copies.SideStream,
  pages: int,
) -> float:
  """GB/s of driver copies of single fragments, from arrays that are built beforehand."""
  copies = driver_copies(pools, direction, min(pages, pools.pages))
  call = functools.partial(submit, copies, side.stream)
  seconds = io_bench.seconds_on_stream(call, side, calls=2)
  return copies.targets.size * copies.size_bytes / seconds / io_bench.GB


def _checked(answer) -> Any:
  code, *results = answer
  if int(code):
    raise RuntimeError(f"CUDA: {code}")
  return results[0] if results else None
