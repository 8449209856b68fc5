#include <string.h>

#include <algorithm>

#include "core/addresses.hpp"
#include "core/parallel.hpp"
#include "csr/csr.hpp"
#include "csr/transposed.hpp"
#include "isa/dispatch.hpp"

namespace blocksparse {

BLOCKSPARSE_IN_EACH_SET(const CsrKernels& select_csr(DType dtype))

namespace {

constexpr decltype(&portable::select_csr) kSelect[] = {BLOCKSPARSE_BY_VECTORS(select_csr)};

// Bytes of packed panels per pass over the weights.
constexpr int64_t kPanelBytes = 8 << 20;
// In larger panels the next rows are prefetched; about the cache of one core.
constexpr int64_t kCachedBytes = 1 << 20;
// Larger outputs bypass the caches, since they would be evicted before they are read.
constexpr int64_t kStreamedBytes = 32 << 20;
// Work of one task: features to pack; connections, of which each output costs kOutputCost.
constexpr int64_t kPackFeatures = 512, kTaskConnections = 2048, kOutputCost = 4;

// Most vectors of tokens in a panel of the sampled product.
constexpr int64_t kSampleVectors = 8;

// Tokens cut into panels of about equal width.
struct Panels {
  int64_t tokens, lanes, vectors, count, narrow = 0;

  Panels(int64_t tokens, const CsrKernels& kernels, int64_t max_vectors)
      : tokens(tokens), lanes(kernels.lanes), vectors(ceil_div(tokens, lanes)) {
    count = ceil_div(vectors, max_vectors);
    if (tokens <= lanes / 2)
      for (narrow = 1; narrow < tokens;) narrow *= 2;
  }
  int64_t first_vector(int64_t p) const { return vectors * p / count; }
  int64_t first(int64_t p) const { return first_vector(p) * lanes; }
  int64_t width(int64_t p) const { return narrow ? narrow : (first_vector(p + 1) - first_vector(p)) * lanes; }
  int64_t real(int64_t p) const { return std::min(tokens - first(p), width(p)); }
  int64_t widest() const { return narrow ? narrow : count ? ceil_div(vectors, count) * lanes : 0; }
};

// Return panels as wide as registers allow, or narrower ones if only these fit the cache of one core.
Panels row_panels(int64_t tokens, const CsrKernels& kernels, int64_t features) {
  const int64_t vector_bytes = features * kernels.lanes * int64_t(kernels.unit_size);
  int64_t vectors = kernels.max_vectors;
  while (vectors > 2 && vectors * vector_bytes > kCachedBytes) vectors /= 2;
  return Panels(tokens, kernels, vectors * vector_bytes > kCachedBytes ? kernels.max_vectors : vectors);
}

// Return the panels of the sampled product. Each panel costs a pass over the values. 16-bit types sum over all tokens
// at once, since sums over parts would round.
Panels sample_panels(int64_t tokens, const CsrKernels& kernels, DType dtype) {
  return Panels(tokens, kernels, size_of(dtype) == 2 ? ceil_div(tokens, kernels.lanes) + 1 : kSampleVectors);
}

int64_t panel_bytes(const Panels& panels, const CsrKernels& kernels, int64_t features) {
  return ceil_div(panels.widest() * features * int64_t(kernels.unit_size), 64) * 64;
}

int64_t panels_at_once(const Panels& panels, int64_t bytes) {
  return std::clamp<int64_t>(kPanelBytes / std::max<int64_t>(bytes, 1), 1, std::max<int64_t>(panels.count, 1));
}

// Run independent loops on the threads, one by one or two together.
template <class Loop>
void run(const Loop& loop) {
  parallel_tasks(loop.count(), [&](int64_t i) { loop(i); });
}

template <class First, class Second>
void run_both(const First& first, const Second& second) {
  const int64_t before = first.count();
  parallel_tasks(before + second.count(), [&](int64_t i) { i < before ? first(i) : second(i - before); });
}

// Packs `panels_here` panels of x, from `first` on, `bytes` bytes apart.
struct Packing {
  const CsrKernels& kernels;
  int64_t size;
  const Matrix& x;
  const Panels& panels;
  int64_t first, panels_here, bytes;
  void* to;

  int64_t cuts() const { return ceil_div(x.features, kPackFeatures); }
  int64_t count() const { return panels_here * cuts(); }
  void operator()(int64_t i) const {
    const int64_t p = first + i / cuts(), begin = i % cuts() * kPackFeatures;
    kernels.pack(advance(x.data, panels.first(p) * x.stride * size), x.stride, panels.real(p), begin,
                 std::min(begin + kPackFeatures, x.features), panels.width(p), advance(to, i / cuts() * bytes));
  }
};

int64_t start_of(const Csr& matrix, bool wide, int64_t row) {
  return wide ? static_cast<const int64_t*>(matrix.start)[row] : static_cast<const int32_t*>(matrix.start)[row];
}

// Cuts rows into tasks of equal cost, at whole units of rows that are found by bisection, so that no list is stored.
struct RowCuts {
  const Csr& matrix;
  bool wide;
  int64_t unit, units, tasks;

  RowCuts(const Csr& matrix, bool wide) : matrix(matrix), wide(wide), unit(1) {
    const int64_t rows = matrix.rows, most = kTaskConnections / std::max<int64_t>(matrix.connections / rows, 1);
    while (unit < 64 && 2 * unit <= most && 2 * unit <= rows / 16) unit *= 2;
    units = ceil_div(rows, unit);
    tasks = ceil_div(cost(units), kTaskConnections);
  }
  int64_t row(int64_t u) const { return std::min(u * unit, matrix.rows); }
  int64_t cost(int64_t u) const { return start_of(matrix, wide, row(u)) + row(u) * kOutputCost; }
  // Return the first row of a task: that of the first unit at its cost or beyond.
  int64_t first(int64_t task) const {
    int64_t low = 0, high = units;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cost(middle) < task * kTaskConnections) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return row(low);
  }
};

// Computes the outputs of `panels_here` packed panels, from `first` on.
struct Rows {
  const CsrKernels& kernels;
  int64_t size;
  Activation activation;
  const Panels& panels;
  int64_t first, panels_here;
  const void* packed;
  int64_t bytes;
  const void *values, *bias;
  void* y;
  const RowCuts& cuts;
  const void* factors = nullptr;
  void* samples = nullptr;

  int64_t count() const { return panels_here * cuts.tasks; }
  void operator()(int64_t i) const {
    const int64_t p = first + i / cuts.tasks, task = i % cuts.tasks, outputs = cuts.matrix.rows;
    const int64_t begin = cuts.first(task), end = task + 1 < cuts.tasks ? cuts.first(task + 1) : outputs;
    if (begin == end) return;
    kernels.rows[cuts.wide]({cuts.matrix, values, begin, end, advance(packed, (p - first) * bytes), panels.width(p),
                             panels.real(p), bytes > kCachedBytes, bias, activation,
                             advance(y, panels.first(p) * outputs * size), outputs,
                             panels.tokens * outputs * size > kStreamedBytes, factors, samples});
  }
};

// Sums the products of panel p per connection, and adds them to those of the panels before.
struct Samples {
  const CsrKernels& kernels;
  const Panels& panels;
  int64_t p;
  const void *packed_grad, *packed_x;
  int64_t x_bytes;
  void* values;
  const Csr& matrix;
  bool wide;

  int64_t count() const { return ceil_div(matrix.connections, kTaskConnections); }
  void operator()(int64_t task) const {
    const int64_t begin = task * kTaskConnections, end = std::min(begin + kTaskConnections, matrix.connections);
    kernels.samples[wide](
        {matrix, begin, end, packed_grad, packed_x, panels.width(p), x_bytes > kCachedBytes, p > 0, values});
  }
};

// Packs a gradient, and sums its features to the bias gradient unless that is null.
struct PackedGradient {
  Packing packing;
  void* grad_bias;

  int64_t count() const { return packing.count(); }
  void operator()(int64_t i) const {
    packing(i);
    const int64_t begin = i * kPackFeatures, end = std::min(begin + kPackFeatures, packing.x.features);
    if (grad_bias) packing.kernels.sums(packing.to, begin, end, packing.panels.width(0), grad_bias);
  }
};

}  // namespace

int64_t csr_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t in_features) {
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const Panels panels = row_panels(tokens, kernels, in_features);
  const int64_t bytes = panel_bytes(panels, kernels, in_features);
  return bytes * panels_at_once(panels, bytes);
}

int64_t csr_wgrad_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                int64_t in_features) {
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const Panels panels = sample_panels(tokens, kernels, dtype);
  return panel_bytes(panels, kernels, out_features) + panel_bytes(panels, kernels, in_features);
}

void csr_linear(const InstructionSet& isa, DType dtype, Activation activation, int64_t tokens, Matrix x,
                const void* values, const void* bias, void* y, void* working, const Csr& matrix, bool wide) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype);
  const Panels panels = row_panels(tokens, kernels, x.features);
  const int64_t bytes = panel_bytes(panels, kernels, x.features), at_once = panels_at_once(panels, bytes);
  const bool in_place = tokens == 1 && size == int64_t(kernels.unit_size);  // x is its own panel
  const RowCuts cuts(matrix, wide);

  for (int64_t first = 0; first < panels.count; first += at_once) {
    const int64_t here = std::min(at_once, panels.count - first);
    if (!in_place) run(Packing{kernels, size, x, panels, first, here, bytes, working});
    run(Rows{kernels, size, activation, panels, first, here, in_place ? x.data : working, bytes, values, bias, y,
             cuts});
  }
}

void csr_wgrad(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, void* values,
               void* working, const Csr& matrix, bool wide) {
  const FlushSubnormals flush(dtype == DType::kBFloat16);
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype);
  if (tokens == 0 && matrix.connections > 0) memset(values, 0, matrix.connections * size);
  const Panels panels = sample_panels(tokens, kernels, dtype);
  void* packed_x = advance(working, panel_bytes(panels, kernels, grad.features));
  const int64_t x_bytes = panel_bytes(panels, kernels, x.features);
  for (int64_t p = 0; p < panels.count; ++p) {
    run_both(Packing{kernels, size, grad, panels, p, 1, 0, working},
             Packing{kernels, size, x, panels, p, 1, 0, packed_x});
    run(Samples{kernels, panels, p, working, packed_x, x_bytes, values, matrix, wide});
  }
}

int64_t csr_gradients_working_bytes(const InstructionSet& isa, DType dtype, int64_t tokens, int64_t out_features,
                                    int64_t in_features) {
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const Panels rows = row_panels(tokens, kernels, out_features), samples = sample_panels(tokens, kernels, dtype);
  if (rows.count != 1 || samples.count != 1 || size_of(dtype) == 2) return 0;
  return panel_bytes(rows, kernels, out_features) + panel_bytes(samples, kernels, in_features);
}

void csr_gradients(const InstructionSet& isa, DType dtype, int64_t tokens, Matrix grad, Matrix x, const void* values,
                   void* grad_x, void* grad_values, void* grad_bias, void* working, const Csr& matrix, bool wide) {
  const CsrKernels& kernels = kSelect[isa.index](dtype);
  const int64_t size = size_of(dtype);
  const Panels panels = row_panels(tokens, kernels, grad.features);
  const int64_t bytes = panel_bytes(panels, kernels, grad.features);
  void* packed_x = advance(working, bytes);
  run_both(PackedGradient{{kernels, size, grad, panels, 0, 1, 0, working}, grad_bias},
           Packing{kernels, size, x, panels, 0, 1, 0, packed_x});
  if (grad_x) {
    const RowCuts cuts(matrix, wide);
    run(Rows{kernels, size, Activation::kNone, panels, 0, 1, working, bytes, values, nullptr, grad_x, cuts, packed_x,
             grad_values});
  } else {
    const int64_t x_bytes = panel_bytes(panels, kernels, x.features);
    run(Samples{kernels, panels, 0, working, packed_x, x_bytes, grad_values, matrix, wide});
  }
}

void csr_transposed(const Csr& matrix, bool wide, int64_t cols, void* start, void* row, void* position, bool to_wide) {
  const auto run = [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    transpose_indices(static_cast<const From*>(matrix.start), static_cast<const From*>(matrix.col), matrix.rows, cols,
                      static_cast<To*>(start), static_cast<To*>(row), static_cast<To*>(position));
  };
  if (wide && to_wide) run(int64_t(), int64_t());
  if (wide && !to_wide) run(int64_t(), int32_t());
  if (!wide && to_wide) run(int32_t(), int64_t());
  if (!wide && !to_wide) run(int32_t(), int32_t());
}

}  // namespace blocksparse
