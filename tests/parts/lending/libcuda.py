"""A libcuda of the host's memory."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

# Compiled against CUDA's own header, so that the compiler holds it to CUDA's signatures and
# structs.
LIBCUDA = r"""
#define _GNU_SOURCE
#include <cuda.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define PAGE (2UL << 20)
static int live; static CUcontext current;
static int right(const CUmemAllocationProp *p) {
    CUmemAllocationProp want; memset(&want, 0, sizeof want);
    want.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    want.location.type = CU_MEM_LOCATION_TYPE_DEVICE; want.location.id = 3;
    return !memcmp(p, &want, sizeof want);
}
int live_pages(void) { return live; }
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 3; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice d) {
    *context = (CUcontext)0x7ffff0001234; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) {
    return current == (CUcontext)0x7ffff0001234 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    *size = PAGE; return right(p) && f == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemGetInfo(size_t *available, size_t *total) {
    if (current != (CUcontext)0x7ffff0001234) return CUDA_ERROR_INVALID_CONTEXT;
    *available = (LIMIT - live) * PAGE; *total = LIMIT * PAGE; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    *p = (CUdeviceptr)mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); return CUDA_SUCCESS; }
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
    return munmap((void *)p, n) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
                     unsigned long long flags) {
    if (!right(p) || n != PAGE) return CUDA_ERROR_INVALID_VALUE;
    if (live == LIMIT) return CUDA_ERROR_OUT_OF_MEMORY;
    *h = 0xfedcba9800000000ULL + ++live; return CUDA_SUCCESS; }
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
    live--; return h >> 32 == 0xfedcba98 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) {
    return n == PAGE && !offset && h >> 32 == 0xfedcba98 && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *a, size_t count) {
    if (count != 1 || a->location.type != CU_MEM_LOCATION_TYPE_DEVICE || a->location.id != 3
        || a->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)p, n, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    return mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (void *)p
        ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    if (current != (CUcontext)0x7ffff0001234 || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = (CUstream)0x7ffff0005678; return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) {
    return stream == (CUstream)0x7ffff0005678 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t n, CUstream stream) {
    if (stream != (CUstream)0x7ffff0005678) return CUDA_ERROR_INVALID_VALUE;
    memset((void *)p, value, n); return CUDA_SUCCESS; }
/* The device sees locked pages SHIFT bytes further. A stream does its work at once, so a wait blocks. */
#define SHIFT (1UL << 20)
static char *locked;
CUresult cuMemHostRegister(void *p, size_t n, unsigned flags) {
    locked = p; return flags == (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) && n == 4096
        && current == (CUcontext)0x7ffff0001234 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *p, unsigned flags) {
    *device = (CUdeviceptr)p + SHIFT; return p == locked && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr p, cuuint32_t value, unsigned flags) {
    if (p != (CUdeviceptr)locked + SHIFT || stream != (CUstream)0x77 || flags != CU_STREAM_WAIT_VALUE_AND)
        return CUDA_ERROR_INVALID_VALUE;
    while (!(*(volatile cuuint32_t *)locked & value)) usleep(1000);
    return CUDA_SUCCESS; }
"""


def build_libcuda(folder: Path, pages: int = 3) -> str:
    """Path of a library with the driver's calls, whose GPU has this number of pages of 2 MiB."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    header = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include/cuda.h"
    assert header.exists(), f"no {header}: it comes with requirements/test.txt"
    (folder / "fake.c").write_text(LIBCUDA)
    command = ["gcc", "-shared", "-fPIC", "-Werror", f"-DLIMIT={pages}", f"-I{header.parent}", "-o"]
    command += [folder / "libcuda.so", folder / "fake.c"]
    subprocess.run(command, check=True)
    return str(folder / "libcuda.so")
