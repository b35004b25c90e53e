// quantized_gated_silu, quantized_gelu and their gradients: activations of quantised inputs, whose codes are saved. With
// group_codes, which only makes the codes, and gated_silu_of_codes and gelu_of_codes, which compute from them.
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

// Codes of a matrix whose columns are in turn of `ways` others; those of the second follow those of the first. A thread
// makes a vector of each.
template <typename In>
struct Grouping {
  const In* x;
  Saved to[2];
  int64_t vectors;  // of each way
  int shift;        // log2 of the vectors of a group
};

template <typename In, Format F, int ways>
__global__ void __launch_bounds__(256) group_vectors(const Grouping<In> of) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool inside = at < of.vectors;
  Vector<In> held[ways];
#pragma unroll
  for (int i = 0; i < ways; ++i) {
    if (inside) held[i].load(of.x + (ways == 1 ? at : chunk_of(at) + 2 * i) * VECTOR);
    else held[i].clear();
  }
  float v[VECTOR];
  if constexpr (ways == 1) {
    const uint32_t amax = group_largest(held[0].largest(), of.shift);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) v[j] = held[0][j];
    save<F>(v, amax, inside, at, of.shift, of.to[0].codes, of.to[0].exponents);
  } else {
    exchange(held[0], held[1]);
    const PairAmax amax = pair_amax(held[0], held[1], of.shift);
#pragma unroll
    for (int way = 0; way < 2; ++way) {
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) v[j] = held[j >> 2][2 * (j & 3) + way];
      save<F>(v, way ? amax.up : amax.gate, inside, at, of.shift, of.to[way].codes, of.to[way].exponents);
    }
  }
}

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

// The same from codes, which `to` has.
template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gated_rows_of_codes(const GatedForward<In> to) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * to.vectors;
  uint32_t most = 0;
  for (int base = 0; base < to.vectors; base += EACH * blockDim.x) {
    SavedVector<F> gates[EACH], ups[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= to.vectors) continue;
      gates[i].load(to.gate, first + at, to.shift);
      ups[i].load(to.up, first + at, to.shift);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= to.vectors) continue;
      float gate[VECTOR], up[VECTOR];
      gates[i].values(gate);
      ups[i].values(up);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) gate[j] = silu(gate[j]) * up[j];
      const Vector<In> y = round_to_stream<In>(gate);
      most = larger(most, y.largest());
      store_vector(to.y + (first + at) * VECTOR, y);
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
    SavedVector<F> gates[EACH], ups[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      held[i].clear(), gates[i].clear(), ups[i].clear();
      if (at >= of.vectors) continue;
      held[i].load(of.dy + (first + at) * VECTOR);
      gates[i].load(of.gate, first + at, of.shift);
      ups[i].load(of.up, first + at, of.shift);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      float g[VECTOR], u[VECTOR];
      gates[i].decode(g);
      ups[i].decode(u);
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

// The same from codes, which `to` has; `to.x` is not read.
template <typename In, Format F>
__global__ void __launch_bounds__(MOST_THREADS, 2) gelu_rows_of_codes(const GeluForward<In> to) {
  __shared__ uint32_t scratch[MOST_THREADS / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * to.vectors;
  uint32_t most = 0;
  for (int base = 0; base < to.vectors; base += EACH * blockDim.x) {
    SavedVector<F> codes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at < to.vectors) codes[i].load(to.saved, first + at, to.shift);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= to.vectors) continue;
      float x[VECTOR];
      codes[i].values(x);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) x[j] = tanh_gelu(x[j]);
      const Vector<In> y = round_to_stream<In>(x);
      most = larger(most, y.largest());
      store_vector(to.y + (first + at) * VECTOR, y);
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
    SavedVector<F> codes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= of.vectors) continue;
      held[i].load(of.dy + (first + at) * VECTOR);
      codes[i].load(of.saved, first + at, of.shift);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = base + i * blockDim.x + threadIdx.x;
      if (at >= of.vectors) continue;
      float x[VECTOR];
      codes[i].decode(x);
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

// Saved codes for a kernel, of `elements` elements.
SavedTensors read_saved(const Tensor& codes, const Tensor& exponents, int64_t elements, Format format, int64_t group) {
  const int64_t bytes = elements / (format == Format::E2M1 ? 2 : 1);
  STD_TORCH_CHECK(codes.numel() == bytes && exponents.numel() == elements / group,
                  "codes and exponents are those of another matrix");
  return {vectorised(codes), dense(exponents)};
}

// The second of two equal parts of saved codes of `elements` elements each.
Saved second_of(const Saved& both, int64_t elements, Format format, int64_t group) {
  return {both.codes + elements / (format == Format::E2M1 ? 2 : 1), both.exponents + elements / group};
}

std::tuple<Tensor, Tensor> group_codes(const Tensor& given, std::string format_name, int64_t group, int64_t ways) {
  STD_TORCH_CHECK(ways == 1 || ways == 2, "ways is 1 or 2, not ", ways);
  const Tensor x = vectorised(given);
  const Format format = parse_format(format_name);
  STD_TORCH_CHECK(x.size(1) % ways == 0, "ways of ", ways, " do not divide ", x.size(1), " columns");
  const int64_t rows = x.size(0), columns = x.size(1) / ways, elements = rows * columns;
  const int shift = group_shift(columns, group);
  const SavedTensors made{saved_codes(x, ways * rows, columns, format),
                          empty_like_device(x, {ways * rows, columns / group}, ScalarType::Byte)};
  if (elements == 0) return {made.codes, made.exponents};
  const Saved first = made.data();
  with_stream_type(x, [&](auto in) {
    using In = typename decltype(in)::Type;
    const Grouping<In> of{data_of<In>(x), {first, second_of(first, elements, format, group)}, elements / VECTOR, shift};
    with_saved_format(format, [&](auto tag) {
      constexpr Format F = decltype(tag)::value;
      auto kernel = ways == 1 ? group_vectors<In, F, 1> : group_vectors<In, F, 2>;
      kernel<<<ceil_div(of.vectors, 256), 256, 0, stream_of(x)>>>(of);
    });
  });
  check_launch("group_codes");
  return {made.codes, made.exponents};
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

std::tuple<Tensor, Tensor> gated_silu_of_codes(const Tensor& codes, const Tensor& exponents, std::string format_name,
                                               int64_t group, ScalarType dtype) {
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(codes) / 2, columns = columns_of(codes, format), elements = rows * columns;
  STD_TORCH_CHECK(codes.size(0) % 2 == 0, "the first half of the rows is of gate, the other of up");
  const int shift = group_shift(columns, group);
  const SavedTensors both = read_saved(codes, exponents, 2 * elements, format, group);
  Tensor y = empty_like_device(codes, {rows, columns}, dtype), amax = empty_like_device(codes, {rows}, ScalarType::Float);
  if (rows == 0) return {y, amax};
  with_stream_type(y, [&](auto in) {
    using In = typename decltype(in)::Type;
    const Saved gate = both.data();
    const GatedForward<In> to{nullptr, mutable_data_of<In>(y), mutable_data_of<float>(amax), gate,
                              second_of(gate, elements, format, group), static_cast<int>(columns / VECTOR), shift};
    with_saved_format(format, [&](auto tag) {
      gated_rows_of_codes<In, decltype(tag)::value><<<rows, row_threads(to.vectors), 0, stream_of(y)>>>(to);
    });
  });
  check_launch("gated_silu_of_codes");
  return {y, amax};
}

std::tuple<Tensor, Tensor> quantized_gated_silu_backward(const Tensor& given, const Tensor& gate_codes,
                                               const Tensor& gate_exponents, const Tensor& up_codes,
                                               const Tensor& up_exponents, std::string format_name, int64_t group) {
  const Tensor dy = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(dy), columns = dy.size(1);
  const int shift = group_shift(columns, group);
  const SavedTensors gate = read_saved(gate_codes, gate_exponents, dy.numel(), format, group);
  const SavedTensors up = read_saved(up_codes, up_exponents, dy.numel(), format, group);
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

std::tuple<Tensor, Tensor> gelu_of_codes(const Tensor& codes, const Tensor& exponents, std::string format_name,
                                         int64_t group, ScalarType dtype) {
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(codes), columns = columns_of(codes, format);
  const int shift = group_shift(columns, group);
  const SavedTensors saved = read_saved(codes, exponents, rows * columns, format, group);
  Tensor y = empty_like_device(codes, {rows, columns}, dtype), amax = empty_like_device(codes, {rows}, ScalarType::Float);
  if (rows == 0) return {y, amax};
  with_stream_type(y, [&](auto in) {
    using In = typename decltype(in)::Type;
    const GeluForward<In> to{nullptr, mutable_data_of<In>(y), mutable_data_of<float>(amax), saved.data(),
                             static_cast<int>(columns / VECTOR), shift};
    with_saved_format(format, [&](auto tag) {
      gelu_rows_of_codes<In, decltype(tag)::value><<<rows, row_threads(to.vectors), 0, stream_of(y)>>>(to);
    });
  });
  check_launch("gelu_of_codes");
  return {y, amax};
}

std::tuple<Tensor, Tensor> quantized_gelu_backward(const Tensor& given, const Tensor& codes, const Tensor& exponents,
                                              std::string format_name, int64_t group) {
  const Tensor dy = vectorised(given);
  const Format format = parse_format(format_name);
  const int64_t rows = rows_of(dy), columns = dy.size(1);
  const int shift = group_shift(columns, group);
  const SavedTensors saved = read_saved(codes, exponents, dy.numel(), format, group);
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
  m.impl("group_codes", TORCH_BOX(&lowprec::group_codes));
  m.impl("gated_silu_of_codes", TORCH_BOX(&lowprec::gated_silu_of_codes));
  m.impl("gelu_of_codes", TORCH_BOX(&lowprec::gelu_of_codes));
  m.impl("quantized_gelu", TORCH_BOX(&lowprec::quantized_gelu));
  m.impl("quantized_gelu_backward", TORCH_BOX(&lowprec::quantized_gelu_backward));
}
