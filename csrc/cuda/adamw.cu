// adamw: one step of AdamW over many tensors, in place, whatever their state is stored in (ops/updates.py is the meaning).
//
//     tables   the tensors' addresses and this step's constants go to device memory, as parameters of small kernels
//     squares  with update clipping: the updates' RMS, and the rates that follow
//     maxima   where codes lie under one scale a tensor: its new largest magnitude, by making the update without writing
//     update   moments, weights, codes and what belongs to groups
//     finish   scales of whole tensors and step counters, which the passes before still read
//
// Bytes: the maxima's pass reads the gradient and the old state once more (not the weights, where these are no codes).
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int BATCH = 26;  // tensors of one launch: kernel parameters are 4 KB
constexpr uint32_t STREAM = 1u << 16;  // of masters' draws (optim/master.py)

struct Batch {
  Item items[BATCH];
  int start, count, total;
};
static_assert(sizeof(Batch) + 80 <= 4096, "kernel parameters");

struct Schedule {
  double rate, decay;
  const double* corrections;  // [2, total]
  const int64_t* indices;     // [total], where masters draw
  int64_t seed;
};

// The seed of a tensor's rounding in the step that is made: 63 bits.
__device__ uint64_t master_seed(int64_t index, float done, int64_t seed) {
  const uint64_t step = static_cast<uint64_t>(done);
  const Words words = philox(static_cast<uint32_t>(index), STREAM, static_cast<uint32_t>(step),
                             static_cast<uint32_t>(step >> 32), static_cast<uint64_t>(seed));
  return static_cast<uint64_t>(words.w[1] & 0x7fffffffu) << 32 | words.w[0];
}

__global__ void write_table(Batch batch, Schedule schedule, Item* items, Numbers* numbers) {
  const int i = threadIdx.x;
  if (i >= batch.count) return;
  const int at = batch.start + i, place = batch.items[i].aligned >> 1;
  Item item = batch.items[i];
  item.aligned &= 1;
  items[at] = item;
  Numbers made;
  made.correction1 = schedule.corrections[place];
  made.correction2_wide = schedule.corrections[batch.total + place];
  made.correction2 = static_cast<float>(made.correction2_wide);
  made.rate = adam_rate(schedule.rate, schedule.decay, made.correction1, made.correction2_wide);
  made.seed = schedule.indices == nullptr ? 0 : master_seed(schedule.indices[place], *item.step + 1.0f, schedule.seed);
  made.maxima[0] = made.maxima[1] = made.maxima[2] = 0;
  numbers[at] = made;
}

// The rate of a tensor whose updates' RMS is above one is divided by it; a warp a tensor.
__global__ void clip_rates(const Item* items, Numbers* numbers, int count, int64_t units, const double* partial,
                           Schedule schedule) {
  const int which = blockIdx.x;
  const int64_t begin = items[which].first, end = which + 1 < count ? items[which + 1].first : units;
  double total = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += 32) total += partial[i];
  total = warp_sum(total);
  if (threadIdx.x != 0) return;
  const float rms = square_root(static_cast<float>(total / static_cast<double>(items[which].numbers)));
  const double limit = rms < 1.0f ? 1.0 : static_cast<double>(rms);
  const Numbers of = numbers[which];
  numbers[which].rate = adam_rate(schedule.rate / limit, schedule.decay, of.correction1, of.correction2_wide);
}

__global__ void finish(const Item* items, const Numbers* numbers, int count, How how) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || skipped(how)) return;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (scaled(how.stores[k])) *items[i].moments[k].scale = scale_of(how.stores[k], numbers[i].maxima[k]).scale;
  }
  if (scaled(how.master)) *items[i].master_scale = scale_of(Store::FP16, numbers[i].maxima[2]).scale;
  *items[i].step = *items[i].step + 1.0f;
}

Store parse_store(const std::string& name) {
  if (name == "FP32") return Store::FP32;
  if (name == "BF16") return Store::BF16;
  if (name == "FP16 scaled") return Store::FP16;
  if (name == "E4M3 scaled") return Store::E4M3;
  if (name == "E5M2 scaled") return Store::E5M2;
  if (name == "E4M3 expanded") return Store::EXPANDED_E4M3;
  STD_TORCH_CHECK(name == "E5M2 expanded", "unknown codec of a moment: ", name);
  return Store::EXPANDED_E5M2;
}

Master parse_master(const std::string& name) {
  if (name == "FP32") return Master::FP32;
  if (name == "FP16 scaled") return Master::FP16;
  if (name == "FP16 scaled, stochastic") return Master::FP16_STOCHASTIC;
  STD_TORCH_CHECK(name == "BF16, stochastic", "unknown codec of a master: ", name);
  return Master::BF16;
}

uint32_t slowest_code_of(Store store, double beta1) {
  if (store == Store::BF16) return slowest_code<Format::BF16>(beta1);
  if (store == Store::FP16) return slowest_code<Format::FP16>(beta1);
  if (store == Store::E4M3) return slowest_code<Format::E4M3>(beta1);
  return store == Store::E5M2 ? slowest_code<Format::E5M2>(beta1) : 0;
}

ScalarType type_of(Store store) {
  switch (store) {
    case Store::FP32:
      return ScalarType::Float;
    case Store::BF16:
      return ScalarType::BFloat16;
    case Store::FP16:
      return ScalarType::Half;
    case Store::E4M3:
    case Store::EXPANDED_E4M3:
      return ScalarType::Float8_e4m3fn;
    default:
      return ScalarType::Float8_e5m2;
  }
}

int parts_of(Store store) { return expanded(store) ? 4 : scaled(store) ? 2 : 1; }

void* address(const Tensor& x, const Tensor& like, ScalarType type, int64_t numbers) {
  STD_TORCH_CHECK(x.is_contiguous() && x.get_device_index() == like.get_device_index() && !x.is_cpu() &&
                      x.scalar_type() == type && x.numel() == numbers,
                  "adamw: a parameter's gradient and state are contiguous, on its device, of its size and their codecs' dtypes");
  return x.mutable_data_ptr();
}

Held held_of(const std::vector<Tensor>& parts, size_t place, Store store, const Tensor& like, int64_t groups) {
  const size_t each = parts_of(store);
  Held held{address(parts[each * place], like, type_of(store), like.numel()), nullptr, nullptr, nullptr};
  float** to[3] = {&held.scale, &held.exponent, &held.center};
  for (size_t i = 1; i < each; ++i) {
    *to[i - 1] = static_cast<float*>(address(parts[each * place + i], like, ScalarType::Float, expanded(store) ? groups : 1));
  }
  return held;
}

// All passes over one kind of kernel's tensors.
void step(std::vector<Item>& items, const How& how, const Schedule& schedule, int64_t total, bool clip, bool usual,
          const Tensor& like, cudaStream_t stream) {
  if (items.empty()) return;
  const bool groups = expanded(how.stores[0]) || expanded(how.stores[1]);
  int64_t units = 0;
  for (Item& item : items) {
    item.first = units;
    units += usual ? expanded_units(item, how) : groups ? group_units(item, how) : flat_units(item, how);
  }
  STD_TORCH_CHECK(usual || units <= INT32_MAX, "adamw: too many elements for one call");
  const int count = static_cast<int>(items.size());
  const int64_t bytes = count * static_cast<int64_t>(sizeof(Item) + sizeof(Numbers)) + (clip ? units * 8 : 0);
  const Tensor space = empty_like_device(like, {bytes}, ScalarType::Byte);
  auto* base = mutable_data_of<uint8_t>(space);
  auto* numbers = reinterpret_cast<Numbers*>(base + count * sizeof(Item));
  const Table table{reinterpret_cast<Item*>(base), numbers, reinterpret_cast<double*>(numbers + count), count, units};
  for (int start = 0; start < count; start += BATCH) {
    Batch batch;
    batch.start = start, batch.count = std::min(BATCH, count - start), batch.total = static_cast<int>(total);
    std::copy_n(items.data() + start, batch.count, batch.items);
    write_table<<<1, 32, 0, stream>>>(batch, schedule, table.items, table.numbers);
  }
  check_launch("adamw");
  const auto launch = groups ? launch_groups : launch_flat;
  if (clip && units > 0) {
    launch(Pass::SQUARES, table, how, stream);
    clip_rates<<<count, 32, 0, stream>>>(table.items, table.numbers, count, units, table.partial, schedule);
    check_launch("adamw");
  }
  const bool maxima = scaled(how.stores[0]) || scaled(how.stores[1]) || scaled(how.master);
  if (maxima && units > 0) launch(Pass::MAXIMA, table, how, stream);
  if (usual && units > 0) launch_expanded(table, how, stream);
  else if (units > 0) launch(Pass::UPDATE, table, how, stream);
  finish<<<ceil_div(count, 128), 128, 0, stream>>>(table.items, table.numbers, count, how);
  check_launch("adamw");
}

void adamw(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> first, std::vector<Tensor> second,
           std::vector<Tensor> masters, std::vector<Tensor> steps, Tensor corrections, std::optional<Tensor> indices,
           std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf, std::string first_codec,
           std::string second_codec, std::string master_codec, int64_t group, std::vector<int64_t> segments,
           int64_t seed, double lr, double beta1, double beta2, double eps, double weight_decay, bool clip) {
  const size_t count = params.size();
  if (count == 0) return;
  const Tensor& like = params[0];
  How how{};
  how.stores[0] = parse_store(first_codec), how.stores[1] = parse_store(second_codec);
  how.master = parse_master(master_codec);
  how.constants = adam_constants(beta1, beta2, eps);
  how.slowest = slowest_code_of(how.stores[0], beta1);
  how.floor = static_cast<float>(eps * eps);
  how.group = group;
  how.bf16_gradient = grads[0].scalar_type() == ScalarType::BFloat16;
  if (grad_scale.has_value()) how.grad_scale = static_cast<float*>(address(*grad_scale, like, ScalarType::Float, 1));
  if (found_inf.has_value()) how.found_inf = static_cast<float*>(address(*found_inf, like, ScalarType::Float, 1));
  const bool draws = how.master == Master::FP16_STOCHASTIC || how.master == Master::BF16;
  STD_TORCH_CHECK(grads.size() == count && steps.size() == count && segments.size() == count &&
                      first.size() == count * parts_of(how.stores[0]) && second.size() == count * parts_of(how.stores[1]) &&
                      masters.size() == (scaled(how.master) ? 2 * count : 0) && indices.has_value() == draws,
                  "adamw: as many gradients, states and counters as parameters, and indices where masters draw");
  const auto n = static_cast<int64_t>(count);
  Schedule schedule{lr, weight_decay, static_cast<double*>(address(corrections, like, ScalarType::Double, 2 * n)), nullptr, seed};
  if (draws) schedule.indices = static_cast<int64_t*>(address(*indices, like, ScalarType::Long, n));
  const bool groups = expanded(how.stores[0]) || expanded(how.stores[1]);
  std::vector<Item> kinds[2];
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    const int64_t numbers = p.numel();
    Item item{};
    item.numbers = numbers;
    item.columns = p.dim() == 0 ? 1 : p.size(p.dim() - 1);
    item.length = item.per_segment = 1;
    int64_t of_groups = 0;
    if (groups && numbers > 0) {
      const Groups made = groups_of(numbers / item.columns, item.columns, group, segments[i]);
      STD_TORCH_CHECK(made.per_segment <= INT32_MAX, "adamw: too many groups in a segment");
      item.length = made.length, item.per_segment = static_cast<int32_t>(made.per_segment), of_groups = made.count;
    }
    item.parameter = address(p, like, how.master == Master::FP32 ? ScalarType::Float : ScalarType::BFloat16, numbers);
    item.gradient = address(grads[i], like, how.bf16_gradient ? ScalarType::BFloat16 : ScalarType::Float, numbers);
    item.moments[0] = held_of(first, i, how.stores[0], p, of_groups);
    item.moments[1] = held_of(second, i, how.stores[1], p, of_groups);
    item.step = static_cast<float*>(address(steps[i], p, ScalarType::Float, 1));
    if (scaled(how.master)) {
      item.master = static_cast<uint16_t*>(address(masters[2 * i], p, ScalarType::Half, numbers));
      item.master_scale = static_cast<float*>(address(masters[2 * i + 1], p, ScalarType::Float, 1));
    }
    const void* arrays[] = {item.parameter, item.gradient, item.moments[0].codes, item.moments[1].codes, item.master};
    item.aligned = 1;
    for (const void* array : arrays) item.aligned &= aligned(array, 16);
    const bool usual = groups && fits_expanded(item, how);
    item.aligned |= static_cast<int32_t>(i) << 1;  // its place among all, until it is in the table
    kinds[usual].push_back(item);
  }
  const cudaStream_t stream = stream_of(like);
  step(kinds[0], how, schedule, n, clip, false, like, stream);
  step(kinds[1], how, schedule, n, clip, true, like, stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) { m.impl("adamw", TORCH_BOX(&adamw)); }

}  // namespace lowprec
