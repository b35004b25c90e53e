// adamw: one in-place step of AdamW over many tensors, for all state formats (defined by ops/adamw.py); adamw_squares
// and adamw_amax: statistics of shards, which ranks reduce before it.
//
//     tables   copies the tensors' addresses and this step's constants to device memory, as parameters of small kernels
//     squares  with update clipping and without a given RMS: computes the RMS of updates, and rates from it
//     amax     with per-tensor scales and without a given amax: computes the new amax, without writing the update
//     update   writes moments, weights, codes and scales of groups
//     finish   writes per-tensor scales and step counters, which earlier passes read
//
// Memory traffic: the amax pass reads the gradient and the old state once more (but no weights, if they are not codes).
#include "cuda/adamw_kernels.h"

namespace lowprec {
namespace {

constexpr int BATCH = 25;  // tensors per launch: kernel parameters are 4 KB
constexpr uint32_t STREAM = 1u << 16;  // of random bits for master weights (ops/updates.py)

struct Batch {
  Item items[BATCH];
  int start, count;
};

// Inputs of the tables. rate: the learning rate. rms [p], amax [p, 3]: of whole tensors, if parameters are shards;
// origins [p, 2] of the shards. indices [p]: if masters use stochastic rounding. All but rate may be nullptr.
struct Schedule {
  const double* rate;
  double decay, beta1, beta2;
  const float *rms, *amax;
  const int64_t *origins, *indices;
  int64_t seed;
};
static_assert(sizeof(Batch) + sizeof(Schedule) + 16 <= 4096, "kernel parameters");

// Seed for rounding a tensor in the current step: 63 bits.
__device__ uint64_t master_seed(int64_t index, float count, int64_t seed) {
  const uint64_t step = static_cast<uint64_t>(count);
  const Words words = philox(static_cast<uint32_t>(index), STREAM, static_cast<uint32_t>(step),
                             static_cast<uint32_t>(step >> 32), static_cast<uint64_t>(seed));
  return static_cast<uint64_t>(words.w[1] & 0x7fffffffu) << 32 | words.w[0];
}

// Rates from the learning rate, which is divided by the RMS if that is above one.
__device__ AdamRate rate_of(const Schedule& schedule, const Numbers& of, float rms) {
  const double limit = rms < 1.0f ? 1.0 : static_cast<double>(rms);
  return adam_rate(*schedule.rate / limit, schedule.decay, of.correction1, of.correction2_wide);
}

__global__ void write_table(Batch batch, Schedule schedule, Item* items, Numbers* numbers) {
  const int i = threadIdx.x;
  if (i >= batch.count) return;
  const Item item = batch.items[i];
  const int at = batch.start + i, place = item.place;
  const float count = *item.step + 1.0f;
  items[at] = item;
  Numbers made;
  made.correction1 = 1.0 - pow(schedule.beta1, static_cast<double>(count));
  made.correction2_wide = 1.0 - pow(schedule.beta2, static_cast<double>(count));
  made.correction2 = static_cast<float>(made.correction2_wide);
  made.rate = rate_of(schedule, made, schedule.rms == nullptr ? 1.0f : schedule.rms[place]);
  made.seed = schedule.indices == nullptr ? 0 : master_seed(schedule.indices[place], count, schedule.seed);
  for (int k = 0; k < 3; ++k) made.amax[k] = schedule.amax == nullptr ? 0 : float_bits(schedule.amax[3 * place + k]);
  for (int k = 0; k < 2; ++k) made.origin[k] = schedule.origins == nullptr ? 0 : schedule.origins[2 * place + k];
  numbers[at] = made;
}

// Adds the sums of squares, a warp per tensor; writes them to `handed_out`, or computes the rates of clipped updates.
__global__ void add_squares(Table table, Schedule schedule, double* handed_out) {
  const int which = blockIdx.x;
  const Item* items = table.items;
  const int64_t begin = items[which].first, end = which + 1 < table.count ? items[which + 1].first : table.units;
  double total = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += 32) total += table.partial[i];
  total = warp_sum(total);
  if (threadIdx.x != 0) return;
  if (handed_out != nullptr) {
    handed_out[items[which].place] = total;
    return;
  }
  const float rms = static_cast<float>(__dsqrt_rn(total / static_cast<double>(items[which].numbers)));
  table.numbers[which].rate = rate_of(schedule, table.numbers[which], rms);
}

__global__ void hand_out_amax(Table table, float* handed_out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= table.count) return;
  for (int k = 0; k < 3; ++k) handed_out[3 * table.items[i].place + k] = bits_float(table.numbers[i].amax[k]);
}

__global__ void finish(Table table, How how) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= table.count || skipped(table.items[i])) return;
  const Item& item = table.items[i];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (scaled(how.stores[k])) *item.moments[k].scale = scale_of(how.stores[k], table.numbers[i].amax[k]).scale;
  }
  if (scaled(how.master)) *item.master_scale = scale_of(Store::FP16, table.numbers[i].amax[2]).scale;
  *item.step = *item.step + 1.0f;
}

Store store_of(const std::string& format, const std::string& scaling) {
  const Format of = parse_format(format);
  if (scaling == "none" && of == Format::FP32) return Store::FP32;
  if (scaling == "none" && of == Format::BF16) return Store::BF16;
  if (scaling == "tensor" && of == Format::FP16) return Store::FP16;
  if (scaling == "tensor" && of == Format::E4M3) return Store::E4M3;
  if (scaling == "tensor" && of == Format::E5M2) return Store::E5M2;
  if (scaling == "expanded" && of == Format::E4M3) return Store::EXPANDED_E4M3;
  STD_TORCH_CHECK(scaling == "expanded" && of == Format::E5M2, "adamw: no codec of ", format, ", scaling ", scaling);
  return Store::EXPANDED_E5M2;
}

Master master_of(const std::string& format, const std::string& scaling, bool stochastic) {
  const Store store = store_of(format, scaling);
  if (store == Store::FP32) return Master::FP32;
  if (store == Store::FP16) return stochastic ? Master::FP16_STOCHASTIC : Master::FP16;
  STD_TORCH_CHECK(store == Store::BF16 && stochastic, "adamw: no master weights in ", format, ", scaling ", scaling);
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

StateTensors state_tensors(const std::vector<Tensor>& parts, size_t place, Store store, const Tensor& like, int64_t groups) {
  const size_t each = parts_of(store);
  StateTensors held{address(parts[each * place], like, type_of(store), like.numel()), nullptr, nullptr, nullptr};
  float** to[3] = {&held.scale, &held.exponent, &held.center};
  for (size_t i = 1; i < each; ++i) {
    *to[i - 1] = static_cast<float*>(address(parts[each * place + i], like, ScalarType::Float, expanded(store) ? groups : 1));
  }
  return held;
}

// Common arguments of the ops (ops/adamw.py).
struct Lists {
  const std::vector<Tensor>&params, &grads, &first, &second, &masters, &steps;
  const std::optional<Tensor>& grad_scale;
  const std::vector<int64_t>& segments;
};

struct Rates {
  const Tensor& lr;
  double beta1, beta2, eps, weight_decay;
};

How how_of(Store first, Store second, Master master, int64_t group, const Lists& lists, const Rates& rates) {
  How how{};
  how.stores[0] = first, how.stores[1] = second, how.master = master;
  how.constants = adam_constants(rates.beta1, rates.beta2, rates.eps);
  how.slowest = slowest_code_of(first, rates.beta1);
  how.floor = static_cast<float>(rates.eps * rates.eps);
  how.group = group;
  how.bf16_gradient = lists.grads[0].scalar_type() == ScalarType::BFloat16;
  how.fp32_parameter = lists.params[0].scalar_type() == ScalarType::Float;
  if (lists.grad_scale.has_value()) {
    how.grad_scale = static_cast<float*>(address(*lists.grad_scale, lists.params[0], ScalarType::Float, 1));
  }
  const size_t count = lists.params.size();
  STD_TORCH_CHECK(master != Master::FP32 || how.fp32_parameter, "adamw: FP32 masters are FP32 parameters");
  STD_TORCH_CHECK(lists.grads.size() == count && lists.steps.size() == count && lists.segments.size() == count &&
                      lists.first.size() == count * parts_of(first) && lists.second.size() == count * parts_of(second) &&
                      lists.masters.size() == (scaled(master) ? 2 * count : 0),
                  "adamw: as many gradients, states and counters as parameters");
  return how;
}

bool in_groups(const How& how) { return expanded(how.stores[0]) || expanded(how.stores[1]); }

Item item_of_lists(const Lists& lists, size_t i, const How& how) {
  const Tensor& p = lists.params[i];
  const int64_t numbers = p.numel();
  Item item{};
  item.numbers = numbers;
  item.place = static_cast<int32_t>(i);
  item.columns = p.dim() == 0 ? 1 : p.size(p.dim() - 1);
  item.length = item.per_segment = item.per_row = 1;
  int64_t of_groups = 0;
  if (in_groups(how) && numbers > 0) {
    const Groups made = groups_of(numbers / item.columns, item.columns, how.group, lists.segments[i]);
    const int64_t per_row = made.per_segment * lists.segments[i];
    STD_TORCH_CHECK(per_row <= INT32_MAX, "adamw: too many groups in a row");
    item.length = made.length, item.per_segment = static_cast<int32_t>(made.per_segment), of_groups = made.count;
    item.per_row = static_cast<int32_t>(per_row);
  }
  item.parameter = address(p, p, how.fp32_parameter ? ScalarType::Float : ScalarType::BFloat16, numbers);
  item.gradient = address(lists.grads[i], p, how.bf16_gradient ? ScalarType::BFloat16 : ScalarType::Float, numbers);
  item.moments[0] = state_tensors(lists.first, i, how.stores[0], p, of_groups);
  item.moments[1] = state_tensors(lists.second, i, how.stores[1], p, of_groups);
  item.step = static_cast<float*>(address(lists.steps[i], p, ScalarType::Float, 1));
  if (scaled(how.master)) {
    item.master = static_cast<uint16_t*>(address(lists.masters[2 * i], p, ScalarType::Half, numbers));
    item.master_scale = static_cast<float*>(address(lists.masters[2 * i + 1], p, ScalarType::Float, 1));
  }
  const void* arrays[] = {item.parameter, item.gradient, item.moments[0].codes, item.moments[1].codes, item.master};
  item.aligned = 1;
  for (const void* array : arrays) item.aligned &= aligned(array, 16);
  return item;
}

// Tensors of one kernel in device memory, stored in `space`. fast: for adamw_expanded.cu.
struct Tables {
  Tensor space;
  Table table;
};

Tables tables_of(std::vector<Item>& items, const How& how, const Schedule& schedule, bool sums, bool fast,
                 const Tensor& like, cudaStream_t stream) {
  int64_t units = 0;
  for (Item& item : items) {
    item.first = units;
    units += fast ? expanded_units(item, how) : in_groups(how) ? group_units(item, how) : flat_units(item, how);
  }
  STD_TORCH_CHECK(fast || units <= INT32_MAX, "adamw: too many elements for one call");
  const int count = static_cast<int>(items.size());
  const int64_t bytes = count * static_cast<int64_t>(sizeof(Item) + sizeof(Numbers)) + (sums ? units * 8 : 0);
  Tables made{empty_like_device(like, {bytes}, ScalarType::Byte), {}};
  auto* base = mutable_data_of<uint8_t>(made.space);
  auto* numbers = reinterpret_cast<Numbers*>(base + count * sizeof(Item));
  made.table = {reinterpret_cast<Item*>(base), numbers, reinterpret_cast<double*>(numbers + count), count, units};
  for (int start = 0; start < count; start += BATCH) {
    Batch batch;
    batch.start = start, batch.count = std::min(BATCH, count - start);
    std::copy_n(items.data() + start, batch.count, batch.items);
    write_table<<<1, 32, 0, stream>>>(batch, schedule, made.table.items, made.table.numbers);
  }
  check_launch("adamw");
  return made;
}

void pass_over(Pass pass, const Table& table, const How& how, cudaStream_t stream) {
  if (table.units > 0) (in_groups(how) ? launch_groups : launch_flat)(pass, table, how, stream);
}

// Runs all passes over the tensors of one kernel, except for statistics that the schedule has.
void step(std::vector<Item>& items, const How& how, const Schedule& schedule, bool clip, bool fast, const Tensor& like,
          cudaStream_t stream) {
  if (items.empty()) return;
  clip = clip && schedule.rms == nullptr;
  const Tables tables = tables_of(items, how, schedule, clip, fast, like, stream);
  const Table& table = tables.table;
  if (clip) {
    pass_over(Pass::SQUARES, table, how, stream);
    add_squares<<<table.count, 32, 0, stream>>>(table, schedule, nullptr);
    check_launch("adamw");
  }
  const bool amax = scaled(how.stores[0]) || scaled(how.stores[1]) || scaled(how.master);
  if (amax && schedule.amax == nullptr) pass_over(Pass::AMAX, table, how, stream);
  if (!fast) pass_over(Pass::UPDATE, table, how, stream);
  else if (table.units > 0) launch_expanded(table, how, stream);
  finish<<<ceil_div(table.count, 128), 128, 0, stream>>>(table, how);
  check_launch("adamw");
}

template <typename T>
const T* optional_address(const std::optional<Tensor>& x, const Tensor& like, ScalarType type, int64_t numbers) {
  return x.has_value() ? static_cast<const T*>(address(*x, like, type, numbers)) : nullptr;
}

const double* rate_in(const Tensor& lr, const Tensor& like) {
  return static_cast<const double*>(address(lr, like, ScalarType::Double, 1));
}

void adamw(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> first, std::vector<Tensor> second,
           std::vector<Tensor> masters, std::vector<Tensor> steps, std::optional<Tensor> grad_scale,
           std::optional<Tensor> rms, std::optional<Tensor> amax, std::optional<Tensor> origins,
           std::optional<Tensor> indices, std::optional<Tensor> found_inf, std::string first_format,
           std::string first_scaling, std::string second_format, std::string second_scaling, std::string master_format,
           std::string master_scaling, bool stochastic, int64_t group, std::vector<int64_t> segments, int64_t seed,
           Tensor lr, double beta1, double beta2, double eps, double weight_decay, bool clip) {
  if (params.empty()) return;
  const Tensor& like = params[0];
  const Lists lists{params, grads, first, second, masters, steps, grad_scale, segments};
  const Master master = master_of(master_format, master_scaling, stochastic);
  How how = how_of(store_of(first_format, first_scaling), store_of(second_format, second_scaling), master, group, lists,
                   {lr, beta1, beta2, eps, weight_decay});
  STD_TORCH_CHECK(indices.has_value() == stochastic, "adamw: indices where masters draw");
  const auto count = static_cast<int64_t>(params.size());
  const Schedule schedule{rate_in(lr, like), weight_decay, beta1, beta2,
                          optional_address<float>(rms, like, ScalarType::Float, count),
                          optional_address<float>(amax, like, ScalarType::Float, 3 * count),
                          optional_address<int64_t>(origins, like, ScalarType::Long, 2 * count),
                          optional_address<int64_t>(indices, like, ScalarType::Long, count), seed};
  const bool of_each = found_inf.has_value() && found_inf->numel() != 1;  // else one number for all
  const auto* skips = optional_address<float>(found_inf, like, ScalarType::Float, of_each ? count : 1);
  std::vector<Item> kinds[2];
  for (size_t i = 0; i < params.size(); ++i) {
    Item item = item_of_lists(lists, i, how);
    item.found_inf = of_each ? skips + i : skips;
    kinds[in_groups(how) && fits_expanded(item, how)].push_back(item);
  }
  const cudaStream_t stream = stream_of(like);
  step(kinds[0], how, schedule, clip, false, like, stream);
  step(kinds[1], how, schedule, clip, true, like, stream);
}

Tensor statistics(Pass pass, const Lists& lists, const How& how, const std::optional<Tensor>& rms, const Rates& rates) {
  const Tensor& like = lists.params[0];
  const auto count = static_cast<int64_t>(lists.params.size());
  const Schedule schedule{rate_in(rates.lr, like), rates.weight_decay, rates.beta1, rates.beta2,
                          optional_address<float>(rms, like, ScalarType::Float, count)};
  std::vector<Item> items;
  for (size_t i = 0; i < lists.params.size(); ++i) items.push_back(item_of_lists(lists, i, how));
  const cudaStream_t stream = stream_of(like);
  const Tables tables = tables_of(items, how, schedule, pass == Pass::SQUARES, false, like, stream);
  pass_over(pass, tables.table, how, stream);
  if (pass == Pass::SQUARES) {
    const Tensor out = empty_like_device(like, {count}, ScalarType::Double);
    add_squares<<<tables.table.count, 32, 0, stream>>>(tables.table, schedule, mutable_data_of<double>(out));
    check_launch("adamw_squares");
    return out;
  }
  const Tensor out = empty_like_device(like, {count, 3}, ScalarType::Float);
  hand_out_amax<<<ceil_div(count, 128), 128, 0, stream>>>(tables.table, mutable_data_of<float>(out));
  check_launch("adamw_amax");
  return out;
}

template <Pass pass>
Tensor adamw_statistics(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> first,
                        std::vector<Tensor> second, std::vector<Tensor> masters, std::vector<Tensor> steps,
                        std::optional<Tensor> grad_scale, std::optional<Tensor> rms, std::string first_format,
                        std::string first_scaling, std::string second_format, std::string second_scaling,
                        std::string master_format, std::string master_scaling, int64_t group,
                        std::vector<int64_t> segments, Tensor lr, double beta1, double beta2, double eps,
                        double weight_decay) {
  const Lists lists{params, grads, first, second, masters, steps, grad_scale, segments};
  const Rates rates{lr, beta1, beta2, eps, weight_decay};
  const Master master = master_of(master_format, master_scaling, true);
  const How how = how_of(store_of(first_format, first_scaling), store_of(second_format, second_scaling), master, group,
                         lists, rates);
  return statistics(pass, lists, how, rms, rates);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lowprec, CUDA, m) {
  m.impl("adamw", TORCH_BOX(&adamw));
  m.impl("adamw_squares", TORCH_BOX(&adamw_statistics<Pass::SQUARES>));
  m.impl("adamw_amax", TORCH_BOX(&adamw_statistics<Pass::AMAX>));
}

}  // namespace lowprec
