// quantized_gated_silu, quantized_gelu and their gradients: activations of quantised inputs, whose codes are saved.
//
// A thread block processes a row, for the amax of its outputs; it only synchronises for that.
//
// Gate and up alternate, so eight pairs are two 16-byte chunks. Neighbouring lanes exchange chunks, so that each access
// of a warp covers whole 32-byte sectors:
//
//     memory      0 1 2 3          lane 0 computes 0 1, lane 1 computes 2 3
//     accesses    first: lane 0 chunk 0, lane 1 chunk 1     second: lane 0 chunk 2, lane 1 chunk 3
#include "cuda/saved.h"
#include "numerics/activations.h"

namespace lowprec {
namespace {

constexpr int MOST_THREADS = 384;
constexpr int EACH = 2;  // vectors in flight per thread

// Converts between (own even chunk, own odd chunk) and the order of accesses: even lanes give their second chunk, odd
// lanes their first. All lanes of a warp must call it.
template <typename In>
__device__ __forceinline__ void exchange(Vector<In>& a, Vector<In>& b) {
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < Vector<In>::WORDS; ++i) {
    const uint32_t given = odd ? a.words[i] : b.words[i];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, given, 1);
    if (odd) a.words[i] = got;
    else b.words[i] = got;
  }
}

// First chunk of 8 elements that a lane accesses for the pairs of `vector`; the second is two chunks after it.
__device__ __forceinline__ int64_t chunk_of(int64_t vector) { return 2 * vector - (threadIdx.x & 1); }

// Largest magnitudes of even and of odd elements within a group.
struct PairAmax {
  uint32_t gate, up;
};

template <typename In>
__device__ __forceinline__ PairAmax pair_amax(const Vector<In>& a, const Vector<In>& b, int shift) {
  if constexpr (sizeof(In) == 2) {  // BF16 patterns have the order of magnitudes, two per word
    uint32_t both = 0;
#pragma unroll
    for (int i = 0; i < Vector<In>::WORDS; ++i) {
      both = __vmaxu2(both, __vmaxu2(a.words[i] & 0x7fff7fffu, b.words[i] & 0x7fff7fffu));
    }
    for (int offset = 1; offset < 1 << shift; offset <<= 1) {
      both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, offset));
    }
    return {both << 16, both & 0x7fff0000u};
  } else {
    PairAmax made{0, 0};
#pragma unroll
    for (int i = 0; i < VECTOR; i += 2) {
      made.gate = larger(made.gate, larger(magnitude_bits(a[i]), magnitude_bits(b[i])));
      made.up = larger(made.up, larger(magnitude_bits(a[i + 1]), magnitude_bits(b[i + 1])));
    }
    return {group_largest(made.gate, shift), group_largest(made.up, shift)};
  }
}

struct Saved {
  uint8_t* codes;
  uint8_t* exponents;
};

template <typename In>
struct GatedForward {
  const In* gate_up;
  In* y;
  float* amax;
  Saved gate, up;
  int vectors, shift;  // vectors of a row of y, log2 of the vectors of a group
};

template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gated_rows(const GatedForward<In> to) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * to.vectors;
  uint32_t most = 0;
  for (int base = 0; base < to.vectors; base += EACH * blockDim.x) {
    Vector<In> a[EACH], b[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;  // both lanes of a pair are inside or both outside
      const In* from = to.gate_up + chunk_of(first + at) * VECTOR;
      if (at < to.vectors) {
        a[i].load(from);
        b[i].load(from + 2 * VECTOR);
      } else {
        a[i].clear();
        b[i].clear();
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      const bool inside = at < to.vectors;
      exchange(a[i], b[i]);
      const PairAmax amax = pair_amax(a[i], b[i], to.shift);
      float gate[VECTOR], up[VECTOR];
#pragma unroll
      for (int j = 0; j < VECTOR / 2; ++j) {
        gate[j] = a[i][2 * j], up[j] = a[i][2 * j + 1];
        gate[j + 4] = b[i][2 * j], up[j + 4] = b[i][2 * j + 1];
      }
      save<F>(gate, amax.gate, inside, first + at, to.shift, to.gate.codes, to.gate.exponents);
      save<F>(up, amax.up, inside, first + at, to.shift, to.up.codes, to.up.exponents);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) gate[j] = silu(gate[j]) * up[j];
      const Vector<In> y = round_to_stream<In>(gate);
      most = larger(most, y.largest());  // zero if outside
      if (inside) store_vector(to.y + (first + at) * VECTOR, y);
    }
  }
  store_row_maximum(most, scratch, to.amax + blockIdx.x);
}

template <typename In>
struct GatedBackward {
  const In* dy;
  Saved gate, up;
  In* dgate_up;
  float* amax;
  int vectors, shift;
};

template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gated_rows_backward(const GatedBackward<In> of) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * of.vectors;
  uint32_t most = 0;
  for (int base = 0; base < of.vectors; base += EACH * blockDim.x) {
    Vector<In> held[EACH];
    SavedCodes<F> gates[EACH], ups[EACH];
    float gate_scale[EACH], up_scale[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      const int64_t vector = first + at;
      held[i].clear(), gates[i].clear(), ups[i].clear();
      gate_scale[i] = up_scale[i] = 0.0f;
      if (at >= of.vectors) continue;
      held[i].load(of.dy + vector * VECTOR);
      gates[i].load(of.gate.codes + vector * SavedCodes<F>::BYTES);
      ups[i].load(of.up.codes + vector * SavedCodes<F>::BYTES);
      gate_scale[i] = saved_multiplier(__ldg(of.gate.exponents + (vector >> of.shift)));
      up_scale[i] = saved_multiplier(__ldg(of.up.exponents + (vector >> of.shift)));
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float g[VECTOR], u[VECTOR];
      gates[i].decode(g, gate_scale[i]);
      ups[i].decode(u, up_scale[i]);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const GatedGradients d = gated_silu_gradients(held[i][j], g[j], u[j]);
        g[j] = d.gate, u[j] = d.up;
      }
      float low[VECTOR], high[VECTOR];
#pragma unroll
      for (int j = 0; j < VECTOR / 2; ++j) {
        low[2 * j] = g[j], low[2 * j + 1] = u[j];
        high[2 * j] = g[j + 4], high[2 * j + 1] = u[j + 4];
      }
      Vector<In> a = round_to_stream<In>(low), b = round_to_stream<In>(high);
      most = larger(most, larger(a.largest(), b.largest()));  // zero if outside
      exchange(a, b);
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= of.vectors) continue;
      In* to = of.dgate_up + chunk_of(first + at) * VECTOR;
      store_vector(to, a);
      store_vector(to + 2 * VECTOR, b);
    }
  }
  store_row_maximum(most, scratch, of.amax + blockIdx.x);
}

template <typename In>
struct GeluForward {
  const In* x;
  In* y;
  float* amax;
  Saved saved;
  int vectors, shift;
};

template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gelu_rows(const GeluForward<In> to) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * to.vectors;
  uint32_t most = 0;
  for (int base = 0; base < to.vectors; base += EACH * blockDim.x) {
    Vector<In> held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at < to.vectors) held[i].load(to.x + (first + at) * VECTOR);
      else held[i].clear();
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      const uint32_t amax = group_largest(held[i].largest(), to.shift);
      float x[VECTOR];
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) x[j] = held[i][j];
      save<F>(x, amax, at < to.vectors, first + at, to.shift, to.saved.codes, to.saved.exponents);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) x[j] = tanh_gelu(x[j]);
      const Vector<In> y = round_to_stream<In>(x);
      most = larger(most, y.largest());
      if (at < to.vectors) store_vector(to.y + (first + at) * VECTOR, y);
    }
  }
  store_row_maximum(most, scratch, to.amax + blockIdx.x);
}

template <typename In>
struct GeluBackward {
  const In* dy;
  Saved saved;
  In* dx;
  float* amax;
  int vectors, shift;
};

template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gelu_rows_backward(const GeluBackward<In> of) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * of.vectors;
  uint32_t most = 0;
  for (int base = 0; base < of.vectors; base += EACH * blockDim.x) {
    Vector<In> held[EACH];
    SavedCodes<F> codes[EACH];
    float scale[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      const int64_t vector = first + at;
      if (at >= of.vectors) continue;
      held[i].load(of.dy + vector * VECTOR);
      codes[i].load(of.saved.codes + vector * SavedCodes<F>::BYTES);
      scale[i] = saved_multiplier(__ldg(of.saved.exponents + (vector >> of.shift)));
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= of.vectors) continue;
      float x[VECTOR];
      codes[i].decode(x, scale[i]);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) x[j] = tanh_gelu_gradient(held[i][j], x[j]);
      const Vector<In> dx = round_to_stream<In>(x);
      most = larger(most, dx.largest());
      store_vector(of.dx + (first + at) * VECTOR, dx);
    }
  }
  store_row_maximum(most, scratch, of.amax + blockIdx.x);
}

// Threads of a row's block: the fewest rounds of EACH vectors for at most MOST_THREADS, evenly filled.
int row_threads(int64_t vectors) {
  const int64_t rounds = ceil_div(vectors, EACH * MOST_THREADS);
  return static_cast<int>(ceil_div(ceil_div(vectors, EACH * rounds), 32) * 32);
}

struct SavedTensors {
  Tensor codes, exponents;
  Saved data() const { return {mutable_data_of<uint8_t>(codes), mutable_data_of<uint8_t>(exponents)}; }
};

SavedTensors new_saved(const Tensor& x, int64_t columns, Format format, int64_t group) {
  const int64_t rows = x.size(0);
  return {saved_codes(x, rows, columns, format), empty_like_device(x, {rows, columns / group}, ScalarType::Byte)};
}

// Saved codes for a backward kernel, as [m, columns] of dy.
SavedTensors read_saved(const Tensor& codes, const Tensor& exponents, const Tensor& dy, Format format, int64_t group) {
  const int64_t bytes = dy.numel() / (format == Format::E2M1 ? 2 : 1);
  STD_TORCH_CHECK(codes.numel() == bytes && exponents.numel() == dy.numel() / group,
                  "codes and exponents are those of another matrix");
  return {vectorised(codes), dense(exponents)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantized_gated_silu(const Tensor& given, std::string format_name,
                                                                      int64_t group) {
  const Tensor gate_up = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(gate_up), columns = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "the columns of gate_up alternate gate, up");
  const int shift = group_shift(columns, group);
  Tensor y = empty_like_device(gate_up, {rows, columns}, gate_up.scalar_type());
  Tensor amax = empty_like_device(gate_up, {rows}, ScalarType::Float);
  const SavedTensors gate = new_saved(gate_up, columns, format, group), up = new_saved(gate_up, columns, format, group);
  if (rows > 0) {
    with_stream_type(gate_up, [&](auto in) {
      using In = typename decltype(in)::Type;
      const GatedForward<In> to{data_of<In>(gate_up), mutable_data_of<In>(y), mutable_data_of<float>(amax),
                                gate.data(), up.data(), static_cast<int>(columns / VECTOR), shift};
      with_saved_format(format, [&](auto tag) {
        gated_rows<In, decltype(tag)::value><<<rows, row_threads(to.vectors), 0, stream_of(gate_up)>>>(to);
      });
    });
    check_launch("quantized_gated_silu");
  }
  return {y, amax, gate.codes, gate.exponents, up.codes, up.exponents};
}

std::tuple<Tensor, Tensor> quantized_gated_silu_backward(const Tensor& given, const Tensor& gate_codes,
                                               const Tensor& gate_exponents, const Tensor& up_codes,
                                               const Tensor& up_exponents, std::string format_name, int64_t group) {
  const Tensor dy = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(dy), columns = dy.size(1);
  const int shift = group_shift(columns, group);
  const SavedTensors gate = read_saved(gate_codes, gate_exponents, dy, format, group);
  const SavedTensors up = read_saved(up_codes, up_exponents, dy, format, group);
  Tensor dgate_up = empty_like_device(dy, {rows, 2 * columns}, dy.scalar_type());
  Tensor amax = empty_like_device(dy, {rows}, ScalarType::Float);
  if (rows == 0) return {dgate_up, amax};
  with_stream_type(dy, [&](auto in) {
    using In = typename decltype(in)::Type;
    const GatedBackward<In> of{data_of<In>(dy), gate.data(), up.data(), mutable_data_of<In>(dgate_up),
                               mutable_data_of<float>(amax), static_cast<int>(columns / VECTOR), shift};
    with_saved_format(format, [&](auto tag) {
      gated_rows_backward<In, decltype(tag)::value><<<rows, row_threads(of.vectors), 0, stream_of(dy)>>>(of);
    });
  });
  check_launch("quantized_gated_silu_backward");
  return {dgate_up, amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantized_gelu(const Tensor& given, std::string format_name, int64_t group) {
  const Tensor x = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(x), columns = x.size(1);
  const int shift = group_shift(columns, group);
  Tensor y = empty_like_device(x, {rows, columns}, x.scalar_type());
  Tensor amax = empty_like_device(x, {rows}, ScalarType::Float);
  const SavedTensors saved = new_saved(x, columns, format, group);
  if (rows > 0) {
    with_stream_type(x, [&](auto in) {
      using In = typename decltype(in)::Type;
      const GeluForward<In> to{data_of<In>(x), mutable_data_of<In>(y), mutable_data_of<float>(amax), saved.data(),
                               static_cast<int>(columns / VECTOR), shift};
      with_saved_format(format, [&](auto tag) {
        gelu_rows<In, decltype(tag)::value><<<rows, row_threads(to.vectors), 0, stream_of(x)>>>(to);
      });
    });
    check_launch("quantized_gelu");
  }
  return {y, amax, saved.codes, saved.exponents};
}

std::tuple<Tensor, Tensor> quantized_gelu_backward(const Tensor& given, const Tensor& codes, const Tensor& exponents,
                                              std::string format_name, int64_t group) {
  const Tensor dy = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(dy), columns = dy.size(1);
  const int shift = group_shift(columns, group);
  const SavedTensors saved = read_saved(codes, exponents, dy, format, group);
  Tensor dx = empty_like_device(dy, {rows, columns}, dy.scalar_type());
  Tensor amax = empty_like_device(dy, {rows}, ScalarType::Float);
  if (rows == 0) return {dx, amax};
  with_stream_type(dy, [&](auto in) {
    using In = typename decltype(in)::Type;
    const GeluBackward<In> of{data_of<In>(dy), saved.data(), mutable_data_of<In>(dx), mutable_data_of<float>(amax),
                              static_cast<int>(columns / VECTOR), shift};
    with_saved_format(format, [&](auto tag) {
      gelu_rows_backward<In, decltype(tag)::value><<<rows, row_threads(of.vectors), 0, stream_of(dy)>>>(of);
    });
  });
  check_launch("quantized_gelu_backward");
  return {dx, amax};
}

}  // namespace
}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("quantized_gated_silu", TORCH_BOX(&lowprec::quantized_gated_silu));
  m.impl("quantized_gated_silu_backward", TORCH_BOX(&lowprec::quantized_gated_silu_backward));
  m.impl("quantized_gelu", TORCH_BOX(&lowprec::quantized_gelu));
  m.impl("quantized_gelu_backward", TORCH_BOX(&lowprec::quantized_gelu_backward));
}
