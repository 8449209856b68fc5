// What an instruction set provides to the drivers of the ops: a table of functions per element type.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace blocksparse {

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };
// Bytes of a number in memory, and of a sum.
static inline int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
static inline int64_t size_of_sum(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }
enum class Activation { kNone, kRelu, kGelu, kSilu };

// A piece of one block row: the outputs [begin, end) of x W^T, from a packed panel of x. W is a list of blocks;
// `transposed` blocks are stored [sum, output] instead of [output, sum].
struct RowPiece {
  int64_t blocks;           // in this row
  const int32_t* col;       // [blocks], the block of inputs each one multiplies
  const int64_t* position;  // [blocks], its place in `values`
  const void* values;
  int64_t block_out, block_sum;  // outputs and summed inputs of a block
  bool transposed;
  int64_t begin, end;  // outputs of the block row
  const void* panel;   // [in_features / k_pack, width] units; of few tokens x itself
  int64_t width;       // tokens of the panel, with padding; numbers of a row of x
};

// y[tokens, outputs] = activation(sums + bias), of outputs that lie side by side.
struct LinearOutputs {
  void* sums;  // [count, width]
  int64_t count, width, tokens;
  const void* bias;  // of the first output, or null
  Activation activation;
  void* y;  // of the first token and output
  int64_t y_stride;
  bool streams;  // whole cache lines go past the caches
};

// A chunk of tokens, features cut into blocks, to [blocks, tokens / k_pack, padded] units, zeros behind.
struct BlockColumns {
  const void* from;  // of token 0, feature 0
  int64_t stride;
  int64_t tokens;  // of the chunk: the last group of `k_pack` is filled with zeros
  int64_t block, padded;
  void* to;
  int64_t to_stride;  // units from block to block
};

// Blocks of grad^T x that follow each other in one block row, summed over a chunk of tokens.
struct SampledStrip {
  int64_t blocks;
  const int32_t* col;  // [blocks]
  const void* grad;    // [steps, block_out] units of the block row
  const void* x;       // [in_blocks, steps, padded_in] units
  int64_t steps;       // tokens / k_pack
  int64_t block_out, block_in, padded_in;
  void* values;  // [blocks, block_out, block_in]
  bool add;      // to what `values` holds
};

struct LinearKernels {
  int k_pack;       // numbers per unit along the sum
  int lanes;        // units, and sums, in a vector
  int max_vectors;  // of tokens in a panel
  size_t unit_size;
  void (*pack_panel)(const void* x, int64_t stride, int64_t tokens, int64_t first_unit, int64_t last_unit,
                     int64_t width, void* panel);
  // sums [outputs, width]; `next` is fetched meanwhile, as it is probably computed next.
  void (*row_piece)(const RowPiece&, const RowPiece& next, void* sums);
  void (*write_outputs)(const LinearOutputs&);
  void (*pack_block_columns)(const BlockColumns&, int64_t first_step, int64_t last_step, int64_t first_block,
                             int64_t last_block);
  int64_t (*padded_in)(int64_t block_in);  // of the sampled product: a part of a vector, or whole vectors
  int64_t (*strip)(int64_t block_in);      // blocks of a row that it takes at a time
  void (*sampled_strip)(const SampledStrip&);
  // For a few tokens, which need no panel: how often `few_tokens_piece` wants each block of x repeated, usually once; 0
  // where panels are better, or blocks of this shape are not taken. It writes the outputs, too; of these the sums and
  // their width are not used.
  int64_t (*few_tokens)(int64_t tokens, int64_t block_out, int64_t block_sum, bool transposed);
  void (*few_tokens_piece)(const RowPiece&, const LinearOutputs&);
};

// The table for a dtype and the length of the blocks' sums (pairs need an even one).
using SelectLinear = const LinearKernels& (*)(DType dtype, int64_t block_sum);

// A matrix of single numbers by its rows. Indices are all int32 or all int64.
struct Csr {
  const void* start;     // [rows + 1]
  const void* col;       // [connections]
  const void* position;  // [connections], where each number is in `values`; null for their own order
  int64_t rows, connections;
};

// y[tokens, out] = activation(x W^T + bias) for the outputs [first, last) and the tokens of one packed panel of x.
struct CsrRows {
  Csr matrix;
  const void* values;
  int64_t first, last;
  const void* panel;      // [in_features, width] sums' type
  int64_t width, tokens;  // of the panel: with padding, and of those the real ones
  bool fetches;           // the panel is too large for the caches
  const void* bias;       // of output 0, or null
  Activation activation;
  void* y;  // of the panel's first token, output 0
  int64_t y_stride;
  bool streams;  // y goes past the caches
  // Of float32 and float64, where not null: [rows, width] sums' type; the products of a connection's row of these and
  // of the panel, summed, are put in its place of [connections].
  const void* factors = nullptr;
  void* samples = nullptr;
};

// values[k] = grad[row of k] . x[col of k], for the connections [first, last), over the tokens of a panel.
struct CsrSamples {
  Csr matrix;
  int64_t first, last;
  const void *grad, *x;  // [features, width] sums' type
  int64_t width;
  bool fetches, add;  // add: to what `values` holds
  void* values;
};

struct CsrKernels {
  int lanes, max_vectors;  // of tokens: in a vector; in a panel, whose width is a power of two below a vector, or whole
                           // vectors
  size_t unit_size;
  void (*pack)(const void* x, int64_t stride, int64_t tokens, int64_t first, int64_t last, int64_t width, void* panel);
  void (*rows[2])(const CsrRows&);  // with int32 and with int64 indices
  void (*samples[2])(const CsrSamples&);
  // to[feature] = the sum of its row of a panel, for the features [first, last).
  void (*sums)(const void* panel, int64_t first, int64_t last, int64_t width, void* to);
};
using SelectCsr = const CsrKernels& (*)(DType dtype);

// The weights of one block of a convolution, [lane, sum, tap] or [sum, lane, tap] in memory, to [tap, sum / k_pack,
// padded] units, zeros behind.
struct PackedBlock {
  const void* from;
  int64_t lanes, sum, taps, padded;
  bool transposed;  // [sum, lane, tap]
  void* to;
};

// The outputs of one block row of a convolution at some positions: runs of equal length. Class c of the taps is those
// from `class_start[c]` to `class_start[c + 1]`, which meet the positions `class_begin[c]` to `class_end[c]` of each
// run.
struct ConvPiece {
  int64_t blocks;       // in this row
  const int32_t* col;   // [blocks], the block of inputs each one multiplies
  const void* weights;  // [blocks, all_taps, steps, padded] units
  int64_t all_taps, steps, padded, outputs;
  int64_t classes;
  const int64_t *class_start, *class_begin, *class_end;
  bool covered;          // the first class meets all positions
  const int64_t* tap;    // [taps of all classes]
  const int64_t* at;     // [taps of all classes], units from the run's input to the tap's
  const void* x;         // units
  int64_t runs, length;  // positions of a run
  const int64_t* input;  // [runs], units from x to the run's first position
  int64_t input_step;    // units from position to position
  const void* bias;      // of the first output, or null
  Activation activation;
  void* y;                // of the first output
  const int64_t* output;  // [runs], numbers from y to the run's first position
  int64_t output_step;
  bool streams;  // y goes past the caches; it and the blocks of outputs begin where cache lines do
  // What is prefetched meanwhile: next_blocks blocks of inputs, and the same next_lines cache lines of each.
  int64_t next_blocks;
  const int32_t* next_col;  // [next_blocks]
  int64_t next_lines;
  const int64_t* next;  // [next_lines], bytes from x for the first block of inputs
};

// Rows of positions of two images, multiplied: sums[row, lane] += sum over positions of left[row] right[lane].
struct SampledRows {
  int64_t count, steps;
  const void* const* left;   // [count] units, `left_step` apart
  const void* const* right;  // [count] units, `right_step` apart
  int64_t rows, padded, left_step, right_step;
  void* sums;  // [rows, padded]
};

// The sums of one sampled block, [tap, row, padded] in each slice, to [row, lane, tap], or [lane, row, tap] if
// `swapped`.
struct UnpackedBlock {
  void* sums;  // all slices are added to the first
  int64_t slices, slice;
  int64_t rows, lanes, padded, taps;
  bool swapped;
  void* to;
};

struct ConvKernels {
  int k_pack, lanes;
  size_t unit_size, sum_size;
  bool converts;  // the type in memory is not the type that is multiplied
  void (*convert)(const void* from, int64_t count, void* to);
  void (*pack_block)(const PackedBlock&);
  void (*piece)(const ConvPiece&);
  void (*sample)(const SampledRows&);
  void (*unpack_block)(const UnpackedBlock&);
};
using SelectConv = const ConvKernels& (*)(DType dtype, int64_t block_sum);

// Rows of features that lie side by side, the rows `stride` numbers apart; null where there is none.
struct InputRows {
  const void* data;
  int64_t stride;
  const int64_t* index = nullptr;  // the number of each row, if they do not follow each other
};
struct OutputRows {
  void* data;
  int64_t stride;
};
struct RowsPart {
  int64_t first_row, last_row, begin, end;  // features [begin, end)
};

// One step of an LSTM: c_out = f c + i g, h = o tanh(c_out), with the gates i, f, g, o of gain z + add. z, add, gain
// and gates have 4 `hidden` features, the states c are in the type of sums.
struct GatesForward {
  int64_t hidden;
  InputRows z, add;  // add may be null
  const void* gain;  // or null
  InputRows c;
  OutputRows h, c_out, gates;  // gates may be null
};

// Its gradients at gain z + add and at the state before, from those at h (grad_h + grad_y) and at c. Each of these may
// be null.
struct GatesBackward {
  int64_t hidden;
  InputRows gates, c_before, c, grad_h, grad_y, grad_c;
  OutputRows grad_pre, grad_c_before;
};

struct GatesKernels {  // the part's features are those of each gate
  void (*forward)(const GatesForward&, const RowsPart&);
  void (*backward)(const GatesBackward&, const RowsPart&);
};
using SelectGates = const GatesKernels& (*)(DType dtype);

// Layer norms: n = (x - mean) / deviation of each group of `features` numbers that lie side by side in a row, and
// y = (gain n + bias) factor + term, of which a relu leaves what is positive. Gain and bias have the numbers of a row.
struct NormForward {
  int64_t features, groups;
  double epsilon;  // added to the variance
  InputRows x;
  OutputRows normed;        // n, which may take the place of x; or null
  void* scale;              // [rows, groups], 1 / deviation in the type of sums; or null
  const void *gain, *bias;  // these and what follows are for y
  InputRows factor, term;   // each may be null
  bool relu;
  OutputRows y;  // or null
};

// The gradients at x, at the factor, and at gain n + bias, which is that at the term too.
struct NormBackward {
  int64_t features, groups;
  InputRows grad;  // at y
  const void *gain, *bias;
  InputRows normed;
  const void* scale;
  InputRows y, factor;  // y only with a relu; each may be null
  OutputRows grad_factor;
  OutputRows grad_affine;       // null without a relu and a factor, where it would be `grad`
  void *grad_gain, *grad_bias;  // added to, in the type of sums
  OutputRows grad_x;
};

struct NormKernels {
  void (*forward)(const NormForward&, int64_t first_row, int64_t last_row);
  void (*backward)(const NormBackward&, int64_t first_row, int64_t last_row);
  // Behind it: those of gains and biases, summed over all rows, for the numbers [first, last) of a row.
  void (*sums)(const NormBackward&, int64_t rows, int64_t first, int64_t last);
};
using SelectNorm = const NormKernels& (*)(DType dtype);

// Of one head, whose matrices are [queries or keys, features]. `turned` ones are [key blocks, features, padded]: the
// keys of a block side by side, with zeros behind. q is scaled.
struct AttentionForward {
  int64_t d, d_v, block, padded;  // features of q and of v; keys of a block
  bool causal;
  const void *q, *k, *v;  // k is turned
  void *y, *log_sum;      // log_sum [queries], of the exponentials of each query's scores
};
struct AttentionBackward {
  int64_t d, d_v, block_q, block_k, padded;
  bool causal;
  const void *q, *k, *k_turned, *v_turned, *grad, *log_sum, *delta;
  void *grad_q, *grad_k, *grad_v;
};
struct AttentionQueries {  // [first, last), and the blocks of keys that they see
  int64_t first, last, blocks;
  const int32_t* col;
};
struct AttentionKeys {  // a block of them, and the blocks of queries that see it
  int64_t col, blocks;
  const int32_t* row;
};
struct AttentionKernels {
  void (*forward)(const AttentionForward&, const AttentionQueries&);
  void (*backward_rows)(const AttentionBackward&, const AttentionQueries&);  // writes grad_q
  void (*backward_column)(const AttentionBackward&, const AttentionKeys&);   // writes grad_k and grad_v
};
using SelectAttention = const AttentionKernels& (*)(DType dtype);  // of float32 and float64

// Numbers of a part of an elementwise loop, some microseconds of work; a multiple of every vector. Each part of a
// dropout has random numbers of its own, so that the results are the same for any number of threads and any instruction
// set.
constexpr int64_t kPartNumbers = 4096;

// y = factor[code] x, where the code is drawn: 0 where a random number is below `least`, else 1 where x > 0, else 2.
struct DropoutForward {
  const void* x;
  void* y;
  uint8_t* code;
  double factor[3];
  uint64_t seed;
  uint16_t least;
};

// grad_x = factor[code] grad.
struct DropoutBackward {
  const void* grad;
  const uint8_t* code;
  void* grad_x;
  double factor[3];
};

// Of rows of x side by side, whose outputs have twice the features: y = scale [elu(x), elu(-x)], and its gradient.
// Where one of two random numbers for each of x is below `least`, an output is dropped.
struct ConcatElu {
  int64_t features;
  const void *x, *grad;  // grad of the gradient only
  void* to;
  double scale;
  uint64_t seed;
  uint16_t least;
};
constexpr int64_t kConcatEluPart = kPartNumbers / 2;

// velocity = momentum velocity - rate grad; weight = keep weight + velocity.
struct MomentumStep {
  void *weight, *velocity;
  const void* grad;
  double momentum, rate, keep;
};

// y = a b.
struct RowsProduct {
  InputRows a, b;
  OutputRows y;
};

// Of the numbers [first, last) of the part that begins at a multiple of kPartNumbers, or of a part of rows.
struct ElementwiseKernels {
  void (*dropout_forward)(const DropoutForward&, int64_t first, int64_t last);
  void (*dropout_backward)(const DropoutBackward&, int64_t first, int64_t last);
  // Of parts of kConcatEluPart.
  void (*concat_elu_forward)(const ConcatElu&, int64_t first, int64_t last);
  void (*concat_elu_backward)(const ConcatElu&, int64_t first, int64_t last);
  void (*momentum_step)(const MomentumStep&, int64_t first, int64_t last);
  void (*multiply)(const RowsProduct&, const RowsPart&);
};
using SelectElementwise = const ElementwiseKernels& (*)(DType dtype);

// One row of x in 8 bits: number k is (to[k] - 128) * scale, in blocks of `padded` bytes.
struct QuantizedRow {
  const void* from;
  int64_t blocks, block, padded;
  uint8_t* to;
  float* scale;  // NaN where a number is not finite
};

// The outputs [begin, end) of one block row of y = activation(x W^T + bias), with x and W in 8 bits.
struct Int8Piece {
  int64_t blocks;      // in this row, one behind the other
  const int32_t* col;  // [blocks], the block of inputs each one multiplies
  const int8_t* w;     // [blocks, steps, padded_out, 4]: 4 inputs a step
  const float* scale;  // [blocks, padded_out]
  const int32_t* sum;  // [blocks, padded_out], of each output's weights
  int64_t steps, padded_out, begin, end;
  const uint8_t* x;      // [tokens, in_blocks, 4 steps]
  int64_t x_stride;      // bytes
  const float* x_scale;  // [tokens]
  int64_t tokens;
  const void* bias;  // of output `begin`, or null
  Activation activation;
  void* y;  // of token 0, output `begin`
  int64_t y_stride;
};

struct Int8Kernels {
  void (*quantize)(const QuantizedRow&);
  void (*piece)(const Int8Piece&);
};
using SelectInt8 = const Int8Kernels& (*)(DType dtype);

// For all but pairs of bfloat16, instruction sets that multiply these use the kernels of AVX-512.
namespace avx512 {
const LinearKernels& select_linear(DType dtype, int64_t block_sum);
const ConvKernels& select_conv(DType dtype, int64_t block_sum);
}  // namespace avx512

struct InstructionSet {
  const char* name;
  bool (*present)();
  SelectLinear linear;
  SelectCsr csr;
  SelectConv conv;
  SelectGates gates;
  SelectNorm norm;
  SelectElementwise elementwise;
  SelectInt8 int8;
  SelectAttention attention;
};

}  // namespace blocksparse
