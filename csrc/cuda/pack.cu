// E2M1 codes, two per byte (ops/reference.py pack_e2m1); memory traffic is 1.5 bytes per code.
#include "cuda/nibbles.h"

namespace lowprec {
namespace {

constexpr int PACK_THREADS = 256, EACH = 4;

// Packs 16 codes into 8 bytes, four times per thread; a warp accesses whole sectors on both sides.
__global__ void __launch_bounds__(PACK_THREADS) pack_words(const uint4* __restrict__ codes, uint2* __restrict__ out,
                                                           int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * PACK_THREADS * EACH + threadIdx.x;
  uint4 held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i * PACK_THREADS < count) held[i] = __ldg(codes + first + i * PACK_THREADS);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint4 a = held[i];
    if (first + i * PACK_THREADS >= count) continue;
    out[first + i * PACK_THREADS] = make_uint2(packed(a.x, a.y), packed(a.z, a.w));
  }
}

__global__ void __launch_bounds__(PACK_THREADS) unpack_words(const uint2* __restrict__ in, uint4* __restrict__ codes,
                                                             int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * PACK_THREADS * EACH + threadIdx.x;
  uint2 held[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i * PACK_THREADS < count) held[i] = __ldg(in + first + i * PACK_THREADS);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint2 a = held[i];
    if (first + i * PACK_THREADS >= count) continue;
    codes[first + i * PACK_THREADS] =
        make_uint4(unpacked(a.x), unpacked(a.x >> 16), unpacked(a.y), unpacked(a.y >> 16));
  }
}

__global__ void __launch_bounds__(PACK_THREADS) pack_bytes(const uint8_t* __restrict__ codes, uint8_t* __restrict__ out,
                                                           int64_t first, int64_t count) {
  const int64_t i = first + static_cast<int64_t>(blockIdx.x) * PACK_THREADS + threadIdx.x;
  if (i >= count) return;
  out[i] = static_cast<uint8_t>(packed(codes[2 * i] | codes[2 * i + 1] << 8, 0u));
}

__global__ void __launch_bounds__(PACK_THREADS) unpack_bytes(const uint8_t* __restrict__ in,
                                                             uint8_t* __restrict__ codes, int64_t first,
                                                             int64_t count) {
  const int64_t i = first + static_cast<int64_t>(blockIdx.x) * PACK_THREADS + threadIdx.x;
  if (i >= count) return;
  const uint32_t two = unpacked(in[i]);
  codes[2 * i] = static_cast<uint8_t>(two);
  codes[2 * i + 1] = static_cast<uint8_t>(two >> 8);
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  shape.push_back(last);
  return shape;
}

// Launches `words` for whole 8 bytes of the packed side, and `bytes` for the rest.
template <typename In, typename Out, typename Bytes>
void launch(const uint8_t* in, uint8_t* out, int64_t count, cudaStream_t stream,
            void (*words)(const In*, Out*, int64_t), Bytes bytes) {
  const int64_t whole = aligned(in, sizeof(In)) && aligned(out, sizeof(Out)) ? count / 8 : 0;
  if (whole > 0) {
    words<<<ceil_div(whole, PACK_THREADS * EACH), PACK_THREADS, 0, stream>>>(reinterpret_cast<const In*>(in),
                                                                             reinterpret_cast<Out*>(out), whole);
  }
  if (whole * 8 < count) {
    bytes<<<ceil_div(count - whole * 8, PACK_THREADS), PACK_THREADS, 0, stream>>>(in, out, whole * 8, count);
  }
}

Tensor pack_e2m1(const Tensor& given) {
  STD_TORCH_CHECK(given.element_size() == 1 && given.dim() > 0, "pack_e2m1 takes codes of one byte");
  const int64_t columns = given.size(given.dim() - 1);
  STD_TORCH_CHECK(columns % 2 == 0, "two E2M1 codes make a byte; the last dimension ", columns, " is odd");
  const Tensor codes = dense(given);
  Tensor out = empty_like_device(codes, with_last(codes, columns / 2), ScalarType::Byte);
  launch(data_of<uint8_t>(codes), mutable_data_of<uint8_t>(out), out.numel(), stream_of(codes), pack_words, pack_bytes);
  check_launch("pack_e2m1");
  return out;
}

}  // namespace

Tensor unpack_e2m1(const Tensor& given) {
  STD_TORCH_CHECK(given.scalar_type() == ScalarType::Byte && given.dim() > 0, "unpack_e2m1 takes bytes");
  const Tensor in = dense(given);
  Tensor codes =
      empty_like_device(in, with_last(in, 2 * in.size(in.dim() - 1)), ScalarType::Float8_e4m3fn);
  launch(data_of<uint8_t>(in), mutable_data_of<uint8_t>(codes), in.numel(), stream_of(in), unpack_words, unpack_bytes);
  check_launch("unpack_e2m1");
  return codes;
}

namespace {

void unpack_e2m1_all(std::vector<Tensor> packed, std::vector<Tensor> codes) {
  STD_TORCH_CHECK(packed.size() == codes.size(), "codes for each packed tensor");
  for (size_t i = 0; i < packed.size(); ++i) {
    const Tensor &in = packed[i], &out = codes[i];
    STD_TORCH_CHECK(in.scalar_type() == ScalarType::Byte && out.element_size() == 1 && in.is_contiguous() &&
                        out.is_contiguous() && out.numel() == 2 * in.numel(),
                    "unpack_e2m1_all takes contiguous bytes and writes twice as many");
    launch(data_of<uint8_t>(in), mutable_data_of<uint8_t>(out), in.numel(), stream_of(in), unpack_words, unpack_bytes);
  }
  check_launch("unpack_e2m1_all");
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("pack_e2m1", TORCH_BOX(&lowprec::pack_e2m1));
  m.impl("unpack_e2m1", TORCH_BOX(&lowprec::unpack_e2m1));
  m.impl("unpack_e2m1_all", TORCH_BOX(&lowprec::unpack_e2m1_all));
}
