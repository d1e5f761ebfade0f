/// PTX instructions, one wrapper each (PTX ISA 9.0: "Asynchronous copy", "Warp-level matrix
/// instructions"). Compute capability 8.0 and up, clusters 9.0.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace sparse_mla::ptx {

/// A generic pointer into shared memory as the 32-bit address that the instructions below take.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes global → shared, both 16-byte aligned, past L1. With `valid` false nothing is read and
/// 16 zero bytes are written.
__device__ inline void cp_async_16(std::uint32_t shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async_16(void* shared, const void* global, bool valid = true) {
  cp_async_16(shared_address(shared), global, valid);
}

/// 4 bytes global → shared, both 4-byte aligned.
__device__ inline void cp_async_4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

/// 16 bytes from registers, 16-byte aligned.
__device__ inline void store_shared_16(std::uint32_t shared, const std::uint32_t (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

/// 4 bytes, 4-byte aligned.
__device__ inline void store_shared_4(std::uint32_t shared, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

/// 4 bytes, 4-byte aligned.
__device__ inline float load_shared_float(std::uint32_t shared) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared));
  return value;
}
/// 16 bytes to registers, 16-byte aligned.
__device__ inline uint4 load_shared_16(std::uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

/// Ors `bits` into a 4-byte aligned word of shared memory, atomically.
__device__ inline void or_shared(std::uint32_t shared, std::uint32_t bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(shared), "r"(bits) : "memory");
}

/// Four neighbouring numbers of memory that no one writes meanwhile, 16-byte aligned; −1 four
/// times, unread, unless `valid`. Volatile: a load stays behind what it stands behind, so that
/// registers are needed for those in flight alone.
__device__ inline int4 load_4_or_minus_1(const std::int32_t* from, bool valid) {
  int4 four{-1, -1, -1, -1};
  asm volatile(
      "{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %5, 0;\n\t"
      "@valid ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+r"(four.x), "+r"(four.y), "+r"(four.z), "+r"(four.w)
      : "l"(from), "r"(static_cast<int>(valid)));
  return four;
}

/// Brings the line of that address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `Pending` of this thread's newest groups are in flight.
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Four 8×8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8
/// (16-byte aligned). Register m of lane i holds elements (row i / 4, columns 2·(i % 4), +1) of
/// matrix m.
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  ldmatrix_x4(r, shared_address(row));
}

/// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_transposed(std::uint32_t (&r)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void ldmatrix_x4_transposed(std::uint32_t (&r)[4], const void* row) {
  ldmatrix_x4_transposed(r, shared_address(row));
}

/// d += a · b, a 16×16 row-major, b 16×8 column-major, fp32 accumulators. With g = lane / 4 and
/// t = lane % 4:
///   a[0..3]: (row g, k 2t..), (row g+8, k 2t..), (row g, k 2t+8..), (row g+8, k 2t+8..)
///   b[0..1]: (k 2t.., column g), (k 2t+8.., column g)
///   d[0..3]: (row g, columns 2t, 2t+1), (row g+8, columns 2t, 2t+1)
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same on fp16.
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const std::uint32_t (&a)[4],
                                        std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 2^x, one instruction (relative error 2^-22).
__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The larger one, NaN if either is.
__device__ inline float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// Two floats rounded to nearest into one register, `low` in the lower half.
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// The same as fp16, exact up to 65,504.
__device__ inline std::uint32_t pack_f16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline float2 unpack_f16(std::uint32_t pair) {
  float2 two;
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
      : "=f"(two.x), "=f"(two.y)
      : "r"(pair));
  return two;
}

/// Products of two pairs, rounded to nearest.
__device__ inline std::uint32_t multiply_bf16(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// What pack_bf16(low, high) leaves over of both, packed likewise: the second term of low and high.
__device__ inline std::uint32_t pack_bf16_rest(float low, float high) {
  const std::uint32_t packed = pack_bf16(low, high);
  return pack_bf16(low - __uint_as_float(packed << 16),
                   high - __uint_as_float(packed & 0xFFFF0000u));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// The barrier of a cluster's blocks in two halves, for all of their threads. `relaxed`: it orders
/// nothing but mbarriers published by mbarrier_init_fence().
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline std::uint32_t cluster_size() {
  std::uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
/// The address in another block's shared memory of what lies at `shared` in this one's.
__device__ inline std::uint32_t map_to_block(std::uint32_t shared, std::uint32_t rank) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
/// The same as generic addresses.
__device__ inline const void* map_to_block(const void* shared, std::uint32_t rank) {
  const void* address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return address;
}
__device__ inline std::uint32_t load_cluster_4(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
/// 4 bytes into a block's shared memory; they count at the mbarrier of that block.
__device__ inline void store_async_4(std::uint32_t address, std::uint32_t value,
                                     std::uint32_t mbarrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
      "r"(value), "r"(mbarrier)
      : "memory");
}

__device__ inline void store_async_8(std::uint32_t address, std::uint64_t value,
                                     std::uint32_t mbarrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(address),
      "l"(value), "r"(mbarrier)
      : "memory");
}

__device__ inline void mbarrier_init(std::uint64_t* mbarrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)),
               "r"(arrivals)
               : "memory");
}
/// Makes initialised mbarriers known to the cluster, before its barrier.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive_expecting(std::uint64_t* mbarrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)),
      "r"(bytes)
      : "memory");
}
/// Waits for the end of the phase of that parity (0 first); what other blocks stored is seen.
__device__ inline void mbarrier_wait(std::uint64_t* mbarrier, std::uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain%=:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again%=;\n\t}" ::"r"(shared_address(mbarrier)),
      "r"(parity)
      : "memory");
}
#endif

}  // namespace sparse_mla::ptx
