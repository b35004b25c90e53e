// The gradient of a rotary embedding's input (ops/rotary.py), a pair of elements per thread. ladder_inputs.h has the
// kernel that also quantises it.
#include "cuda/rotary.h"

#include "cuda/vectors.h"

namespace lowprec {
namespace {

constexpr int THREADS = 256;

template <typename In>
__global__ void __launch_bounds__(THREADS)
    rotary_gradients(const In* __restrict__ dq, const In* __restrict__ dk, const In* __restrict__ dv,
                     const float* __restrict__ cosines, const float* __restrict__ sines, In* __restrict__ dx,
                     RotaryShape shape) {
  const int64_t half = shape.head / 2, at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t row = at / (shape.columns / 2), pair = at % (shape.columns / 2);
  if (row >= shape.rows) return;
  const int64_t head = pair / half, i = pair % half, group = head / (shape.queries + 2), place = head % (shape.queries + 2);
  const int64_t of_keys = (row * shape.groups + group) * shape.head;
  const In* from = (place == shape.queries ? dk : dv) + of_keys;
  if (place < shape.queries) from = dq + of_keys * shape.queries + place * shape.head;
  In* to = dx + row * shape.columns + head * shape.head;
  const float low = from[i].value(), high = from[half + i].value();
  if (place > shape.queries) {
    to[i] = from[i], to[half + i] = from[half + i];
    return;
  }
  const float cosine = cosines[row % shape.tokens * half + i], sine = sines[row % shape.tokens * half + i];
  write_one(to + i, low * cosine + high * sine);
  write_one(to + half + i, high * cosine - low * sine);
}

}  // namespace

RotaryShape rotary_shape(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cosines, const Tensor& sines) {
  const int64_t rows = rows_of(dq), head = 2 * cosines.size(1), tokens = cosines.size(0);
  const int64_t groups = head > 0 ? dk.size(1) / head : 0, queries = groups > 0 ? dq.size(1) / dk.size(1) : 0;
  STD_TORCH_CHECK(tokens > 0 && groups > 0 && dk.size(1) == groups * head && dv.size(1) == dk.size(1) &&
                      dq.size(1) == queries * dk.size(1) && dk.size(0) == rows && dv.size(0) == rows,
                  "rotary_backward: dq [", rows, ", ", dq.size(1), "], dk [", dk.size(0), ", ", dk.size(1), "], dv [",
                  dv.size(0), ", ", dv.size(1), "] for heads of ", head, " and ", tokens, " tokens");
  STD_TORCH_CHECK(sines.size(0) == tokens && 2 * sines.size(1) == head && rows % tokens == 0,
                  "rotary_backward: ", rows, " rows for cosines of ", tokens, " tokens and sines of ", sines.size(0));
  STD_TORCH_CHECK(cosines.scalar_type() == ScalarType::Float && sines.scalar_type() == ScalarType::Float,
                  "rotary_backward: cosines and sines are FP32");
  STD_TORCH_CHECK(dq.scalar_type() == dk.scalar_type() && dq.scalar_type() == dv.scalar_type(),
                  "rotary_backward: dq, dk and dv differ in dtype");
  return {rows, groups * (queries + 2) * head, head, queries, groups, tokens};
}

Tensor rotary_backward(const Tensor& given_dq, const Tensor& given_dk, const Tensor& given_dv, const Tensor& given_cosines,
                       const Tensor& given_sines) {
  const Tensor dq = dense(given_dq), dk = dense(given_dk), dv = dense(given_dv);
  const Tensor cosines = dense(given_cosines), sines = dense(given_sines);
  const RotaryShape shape = rotary_shape(dq, dk, dv, cosines, sines);
  Tensor dx = empty_like_device(dq, {shape.rows, shape.columns}, dq.scalar_type());
  if (shape.rows == 0) return dx;
  with_input(dq, [&](auto in) {
    using In = typename decltype(in)::Type;
    const int64_t blocks = ceil_div(shape.rows * (shape.columns / 2), THREADS);
    rotary_gradients<In><<<blocks, THREADS, 0, stream_of(dq)>>>(data_of<In>(dq), data_of<In>(dk), data_of<In>(dv),
                                                                data_of<float>(cosines), data_of<float>(sines),
                                                                mutable_data_of<In>(dx), shape);
  });
  check_launch("rotary_backward");
  return dx;
}

}  // namespace lowprec

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("rotary_backward", TORCH_BOX(&lowprec::rotary_backward)); }
