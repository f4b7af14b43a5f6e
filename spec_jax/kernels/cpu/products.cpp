// Products of few or many rows with weights that are read as they lie in memory: tasks, experts, and
// the functions that XLA calls.

#include "float_products.h"
#include "integer_products.h"

namespace {

constexpr int64_t kTaskBytes = 1 << 15;  // of weights: less is not worth a task

// All calls at once, of one expert or of several.
template <class Pool>
void run(Pool& pool, std::vector<Call> calls) {
  std::vector<Rounded> rounded(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    if (!calls[i].integers) continue;
    round(pool, calls[i], rounded[i]);
    calls[i].rounded = &rounded[i];
  }
  // A row adds to a panel's work what some bytes of weights do.
  auto cost = [](const Call& call) { return call.panel_bytes() + call.rows * call.inputs * 4; };
  int64_t total = 0;
  for (const Call& call : calls) {
    for (const Matrix& matrix : call.matrices) total += matrix.panels * cost(call);
  }
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Neighbouring panels in a task, a multiple of kTilePanels. Several tasks a thread, so that none
  // waits long.
  const int64_t share = std::max(kTaskBytes, total / (8 * threads));
  struct Task {
    const Call* call;
    const Matrix* matrix;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  for (const Call& call : calls) {
    const int64_t size = std::max<int64_t>(1, share / cost(call) / kTilePanels) * kTilePanels;
    for (const Matrix& matrix : call.matrices) {
      for (int64_t panel = 0; panel < matrix.panels; panel += size) {
        tasks.push_back({&call, &matrix, panel, std::min(panel + size, matrix.panels)});
      }
    }
  }
  parallel(pool, (int64_t)tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    const auto panels = task.call->integers ? integer_panels : float_panels;
    panels(*task.call, *task.matrix, task.begin, task.end);
  });
}

// The rows in the order of their experts, without rows that have none.
std::vector<int64_t> by_expert(const int32_t* experts, int64_t rows) {
  std::vector<int64_t> order;
  for (int64_t r = 0; r < rows; ++r) {
    if (experts[r] >= 0) order.push_back(r);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return experts[a] < experts[b]; });
  return order;
}

// A call for each expert that some row chose. `all` has the rows in their experts' order, and the
// matrices of expert 0, which the others follow at equal distances.
std::vector<Call> calls_of_experts(const Call& all, const int32_t* experts,
                                   const std::vector<int64_t>& order) {
  std::vector<Call> calls;
  for (int64_t begin = 0, end; begin < all.rows; begin = end) {
    const int64_t expert = experts[order[begin]];
    for (end = begin + 1; end < all.rows && experts[order[end]] == expert;) ++end;
    Call call = all;
    call.rows = end - begin;
    call.x += begin * call.inputs;
    if (call.pairs) call.pairs += begin * call.inputs / 2;
    if (call.group_sums) call.group_sums += begin * call.groups;
    const int64_t scale_bytes = call.groups * kLanes * call.scale_bytes();
    const int64_t unit_bytes = (call.groups >> call.unit_shift) * kLanes * 2;
    for (Matrix& matrix : call.matrices) {
      matrix.values += expert * matrix.panels * call.panel_bytes();
      if (matrix.scales) matrix.scales += expert * matrix.panels * scale_bytes;
      if (matrix.minima) matrix.minima += expert * matrix.panels * scale_bytes;
      if (matrix.scale_units) matrix.scale_units += expert * matrix.panels * unit_bytes;
      if (matrix.minimum_units) matrix.minimum_units += expert * matrix.panels * unit_bytes;
      matrix.places += begin;
    }
    calls.push_back(std::move(call));
  }
  return calls;
}

// Some rows of x, one after another.
std::vector<float> gathered(const float* x, int64_t width, const std::vector<int64_t>& rows) {
  std::vector<float> some(rows.size() * width);
  for (size_t r = 0; r < rows.size(); ++r) {
    std::memcpy(&some[r * width], x + rows[r] * width, width * sizeof(float));
  }
  return some;
}

// Zeros in the results of rows that are not among `rows`, which ascend or not.
void clear_others(const Call& call, const std::vector<int64_t>& rows) {
  if ((int64_t)rows.size() == call.rows) return;
  std::vector<bool> among(call.rows);
  for (int64_t row : rows) among[row] = true;
  for (const Matrix& matrix : call.matrices) {
    for (int64_t row = 0; row < call.rows; ++row) {
      float* out = matrix.out + row * matrix.outputs;
      if (!among[row]) std::fill(out, out + matrix.outputs, 0.0f);
    }
  }
}

// The products of some rows of x [call.rows, width].
template <class Pool>
void run_some(Pool& pool, Call call, const float* x, int64_t width, bool minima,
              const std::vector<int64_t>& rows) {
  call.rows = rows.size();
  if (!call.rows) return;
  std::vector<float> some;
  if (rows.back() + 1 != call.rows) {  // they are not the first ones
    if (call.integers && width == call.inputs) {
      call.sources = rows.data();  // rounding reads them where they stand
    } else {
      some = gathered(x, width, rows), x = some.data();
    }
    for (Matrix& matrix : call.matrices) matrix.places = rows.data();
  }
  Activations activations;
  activations.prepare(call, x, width, minima);
  run(pool, {call});
}

// Each row of x [rows, width] times the matrices of its expert. Other experts are not read.
template <class Pool>
void run_experts(Pool& pool, Call call, const float* from, int64_t width, bool minima,
                 const int32_t* experts) {
  const std::vector<int64_t> order = by_expert(experts, call.rows);
  clear_others(call, order);
  call.rows = order.size();
  if (!call.rows) return;
  const std::vector<float> x = gathered(from, width, order);
  Activations activations;
  activations.prepare(call, x.data(), width, minima);
  for (Matrix& matrix : call.matrices) matrix.places = order.data();
  run(pool, calls_of_experts(call, experts, order));
}

namespace ffi = xla::ffi;

// The form of all weights of a call.
struct Form {
  int64_t format;   // a `Format`
  bool integers;    // whether x is rounded to 8 bits
  int64_t offset;   // what was added to values that had signs
  bool scales, minima, units, half;
  bool biases = false;

  Call call(int64_t rows) const {
    Call call{};
    call.format = (Format)format;
    call.integers = integers;
    call.offset = (int32_t)offset;
    call.units = units;
    call.half = half;
    call.rows = rows;
    return call;
  }

  // Inputs of an index of the second dimension of values.
  double inputs_of_index() const {
    static constexpr double kInputs[] = {1, 2, 1, 8, 32 / 5.0, 16 / 3.0};
    return format == kInt8 && integers ? 4 : kInputs[format];
  }
};

// Reads the weights and the results of a call; `axes` stand before the panels in their shapes. A
// weight is its values and, by the form, scales, minima, the units of both, and a bias.
ffi::Error read(Call& call, const Form& form, int64_t axes, int64_t next, ffi::RemainingArgs& args,
                ffi::RemainingRets& rets) {
  const int64_t arrays =
      1 + (form.scales + form.minima) * (form.units ? 2 : 1) + (form.biases ? 1 : 0);
  if ((int64_t)args.size() != next + arrays * (int64_t)rets.size()) {
    return ffi::Error::InvalidArgument("spec_jax_product: arguments do not match");
  }
  call.groups = 1;
  for (size_t k = 0; k < rets.size(); ++k) {
    auto out = rets.get<ffi::Buffer<ffi::F32>>(k);
    if (!out) return ffi::Error::InvalidArgument("spec_jax_product: a result is not float32");
    Matrix matrix{};
    // Points `to` to the next argument; gives its size along `axis` after the first axes.
    auto take = [&](const uint8_t*& to, int64_t axis) -> int64_t {
      auto part = args.get<ffi::AnyBuffer>(next++);
      if (!part) return 0;
      to = (const uint8_t*)part->untyped_data();
      return part->dimensions()[axes + axis];
    };
    const int64_t first = next;
    matrix.panels = take(matrix.values, 0);
    next = first;
    call.inputs = std::lround(take(matrix.values, 1) * form.inputs_of_index());
    if (form.scales) call.groups = take(matrix.scales, 1);
    if (form.minima) take(matrix.minima, 1);
    if (form.units) {
      const int64_t blocks = take(matrix.scale_units, 1);
      while (blocks << call.unit_shift < call.groups) ++call.unit_shift;
      if (form.minima) take(matrix.minimum_units, 1);
    }
    matrix.out = (*out)->typed_data();
    matrix.outputs = (*out)->dimensions()[1];
    if (form.biases) {
      auto bias = args.get<ffi::Buffer<ffi::F32>>(next++);
      if (!bias || (int64_t)bias->element_count() != matrix.outputs) {
        return ffi::Error::InvalidArgument("spec_jax_product: biases do not match");
      }
      matrix.bias = bias->typed_data();
    }
    if ((int64_t)(*out)->dimensions()[0] != call.rows ||
        (matrix.outputs + kLanes - 1) / kLanes != matrix.panels) {
      return ffi::Error::InvalidArgument("spec_jax_product: sizes do not match");
    }
    call.matrices.push_back(matrix);
  }
  call.group = call.inputs / call.groups;
  return ffi::Error::Success();
}

// x [batch * tokens, inputs], how many tokens of each of the batch are real (none: all are), what is
// added to the product of a single weight (or nothing), then the arrays of each weight; the results
// are the products [batch * tokens, outputs].
// The results of other rows are whatever their memory held.
ffi::Error Product(ffi::ThreadPool pool, int64_t format, bool integers, int64_t offset, bool scales,
                   bool minima, bool units, bool half, bool biases, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  const Form form{format, integers, offset, scales, minima, units, half, biases};
  auto x = args.get<ffi::Buffer<ffi::F32>>(0);
  auto num_tokens = args.get<ffi::Buffer<ffi::S32>>(1);
  auto residual = args.get<ffi::Buffer<ffi::F32>>(2);
  if (!x || !num_tokens || !residual) return ffi::Error::InvalidArgument("spec_jax_product: wrong dtypes");
  const int64_t rows = x->dimensions()[0], width = x->dimensions()[1];
  const int64_t batch = num_tokens->element_count();
  if (batch && rows % batch) {
    return ffi::Error::InvalidArgument("spec_jax_product: rows do not match");
  }
  Call call = form.call(rows);
  ffi::Error error = read(call, form, 0, 3, args, rets);
  if (error.failure() || !call.rows) return error;
  if (const int64_t numbers = residual->element_count()) {
    if (call.matrices.size() != 1 || numbers != rows * call.matrices[0].outputs) {
      return ffi::Error::InvalidArgument("spec_jax_product: the residual does not match");
    }
    call.matrices[0].residual = residual->typed_data();
  }
  const auto real = real_rows(num_tokens->typed_data(), batch, rows);
  run_some(pool, call, x->typed_data(), width, minima, real);
  return error;
}

// The same with stacks of weights: each row meets the matrices of its expert, and other experts are
// not read. The second argument is the rows' experts; the results of a row with -1 are zeros.
ffi::Error ExpertProduct(ffi::ThreadPool pool, int64_t format, bool integers, int64_t offset,
                         bool scales, bool minima, bool units, bool half, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  const Form form{format, integers, offset, scales, minima, units, half};
  auto x = args.get<ffi::Buffer<ffi::F32>>(0);
  auto experts = args.get<ffi::Buffer<ffi::S32>>(1);
  auto values = args.get<ffi::AnyBuffer>(2);
  if (!x || !experts || !values || experts->dimensions()[0] != x->dimensions()[0]) {
    return ffi::Error::InvalidArgument("spec_jax_expert_product: arguments do not match");
  }
  Call call = form.call(x->dimensions()[0]);
  const int32_t* chosen = experts->typed_data();
  for (int64_t r = 0; r < call.rows; ++r) {
    if (chosen[r] < -1 || chosen[r] >= values->dimensions()[0]) {
      return ffi::Error::InvalidArgument("spec_jax_expert_product: there is no such expert");
    }
  }
  ffi::Error error = read(call, form, 1, 2, args, rets);
  if (error.failure() || !call.rows) return error;
  run_experts(pool, call, x->typed_data(), x->dimensions()[1], minima, chosen);
  return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("format")
                                  .Attr<bool>("integers")
                                  .Attr<int64_t>("offset")
                                  .Attr<bool>("scales")
                                  .Attr<bool>("minima")
                                  .Attr<bool>("units")
                                  .Attr<bool>("half")
                                  .Attr<bool>("biases")
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxExpertProduct, ExpertProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("format")
                                  .Attr<bool>("integers")
                                  .Attr<int64_t>("offset")
                                  .Attr<bool>("scales")
                                  .Attr<bool>("minima")
                                  .Attr<bool>("units")
                                  .Attr<bool>("half")
                                  .RemainingArgs()
                                  .RemainingRets());
