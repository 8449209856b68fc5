// Products of 8-bit numbers for one instruction set (BLOCKSPARSE_ISA).
//
// Lanes are outputs. One step multiplies 4 unsigned inputs of a token with 4 signed weights of each output and adds the
// products to an int32, exactly. The sum of a block is scaled and added in float32. So all instruction sets agree,
// except on inputs halfway between two integers. With few tokens the time is that of reading the weights once.
#include "int8/int8.hpp"
#include "isa/activation.hpp"
#include "isa/amx.hpp"
#include "isa/element.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace blocksparse {
namespace BLOCKSPARSE_ISA {
namespace {

using Sums = Vector<int32_t>;
constexpr int kOutputs = kLanes<int32_t>;
// Tokens and vectors of outputs of a register tile: its int32 and float32 sums share the registers. With a scale per
// row it has no float32 sums in its loop.
constexpr int kRegisterTokens = kTileRows == 8 ? 6 : 4, kRowTokens = kTileRows == 8 ? 12 : 4;
// Rows whose largest element is smaller count as 0, since the scale would leave the range of float32.
constexpr float kLeast = 1e-36f;
constexpr int kRegisterVectors = kTileRows == 8 ? 2 : 1;
// Steps of a tile in one turn of its loop.
constexpr int kStepsAtOnce = kTileRows == 8 ? 2 : 1;

// Return sum + the products of 4 inputs, the same in all lanes, and 4 weights per lane.
BLOCKSPARSE_INLINE Sums multiply_add_bytes(Sums x, Sums w, Sums sum) {
#if defined(__AVX512VNNI__)
  // With the intrinsic GCC would keep the weights of a tile in memory, though registers are free.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
  return sum;
#elif defined(__AVX512F__)
  const __m512i a = bits<__m512i>(x), b = bits<__m512i>(w), low = _mm512_set1_epi16(255);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, low), _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  return sum + bits<Sums>(even) + bits<Sums>(odd);
#elif defined(__AVX2__)
  struct Parts {
    __m256i part[kVectorBytes / 32];
  };
  const Parts a = bits<Parts>(x), b = bits<Parts>(w);
  Parts even, odd;
  for (int i = 0; i < kVectorBytes / 32; ++i) {
    const __m256i low = _mm256_and_si256(a.part[i], _mm256_set1_epi16(255));
    even.part[i] = _mm256_madd_epi16(low, _mm256_srai_epi16(_mm256_slli_epi16(b.part[i], 8), 8));
    odd.part[i] = _mm256_madd_epi16(_mm256_srli_epi16(a.part[i], 8), _mm256_srai_epi16(b.part[i], 8));
  }
  return sum + bits<Sums>(even) + bits<Sums>(odd);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    sum += (x >> (8 * i) & 255) * (bits<Sums>(bits<Vector<uint32_t>>(w) << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

// Write the sums of a tile to y with scale, bias and activation. A function of its own, so that the constants of
// activations do not take registers from the loop of the tile.
template <class E>
__attribute__((noinline)) void write_tile(const Int8Piece& piece, int64_t token, int64_t output, int tokens,
                                          int vectors, const float* sums) {
  const auto* bias = static_cast<const typename E::Storage*>(piece.bias);
  auto* y = static_cast<typename E::Storage*>(piece.y);
  const int64_t at = output - piece.begin, outputs = smaller<int64_t>(vectors * kOutputs, piece.end - output);
  for (int t = 0; t < tokens; ++t, sums += vectors * kOutputs)
    in_vectors<E>(0, outputs, [&](int64_t o, int64_t count) __attribute__((always_inline)) {
      Vector<float> out = load(sums + o) * piece.x_scale[token + t];
      if (bias) out += read_units<E>(bias + at + o, count);
      if (piece.activation != Activation::kNone) out = activated(out, piece.activation);
      write_sums<E>(y + (token + t) * piece.y_stride + at + o, out, count, false);
    });
}

// Sums start from this number times the sum of the weights, because stored x is 128 too large.
constexpr int32_t kOffset = -128;

BLOCKSPARSE_INLINE const int32_t* weight_sums(const char* scales, int64_t padded_out) {
  return reinterpret_cast<const int32_t*>(scales) + padded_out;
}

// Prefetches the next weights, `bytes` of them for each block.
struct Fetch {
  const char* at;
  const char* end;
  int64_t bytes;

  inline __attribute__((always_inline)) void some() {
    for (const char* stop = at + smaller<int64_t>(bytes, end - at); at < stop; at += 64) __builtin_prefetch(at);
  }
};

// Compute one tile of tokens and vectors of outputs over all blocks of the row. The sums are scaled after each block,
// or with kByRow once.
template <class E, int kTokens, int kVectors, bool kByRow>
BLOCKSPARSE_INLINE void int8_tile(const Int8Piece& piece, int64_t token, int64_t output, Fetch& fetch) {
  using Floats = Vector<float>;
  const int64_t in_block = piece.steps * 4;
  const int64_t stride = piece.x_stride, w_step = piece.padded_out * 4;
  const uint8_t* x = piece.x + token * stride;
  constexpr int kPointers = (kTokens + 2) / 3;
  Floats result[kTokens][kVectors] = {};
  Sums sum[kTokens][kVectors];
  const auto begin_sums = [&](const char* scales) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Sums first = load(weight_sums(scales, piece.padded_out) + output + v * kOutputs) * kOffset;
#pragma GCC unroll 12
      for (int t = 0; t < kTokens; ++t) sum[t][v] = first;
    }
  };
  const auto add_scaled = [&](const char* scales) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = load(reinterpret_cast<const float*>(scales) + output + v * kOutputs);
#pragma GCC unroll 12
      for (int t = 0; t < kTokens; ++t) result[t][v] += __builtin_convertvector(sum[t][v], Floats) * scale;
    }
  };
  if constexpr (kByRow) begin_sums(piece.scales);
  for (int64_t b = 0; b < piece.blocks; ++b) {
    fetch.some();
    const char* w = piece.w + b * piece.block_bytes + output * 4;
    if constexpr (!kByRow) begin_sums(piece.scales + b * piece.block_bytes);
    // A pointer serves up to three tokens, which leaves registers for all sums. The blocks of a row are contiguous, so
    // that the hardware prefetches them.
    const uint8_t* in[kPointers];
#pragma GCC unroll 4
    for (int p = 0; p < kPointers; ++p) in[p] = x + piece.col[b] * in_block + 3 * p * stride;
#pragma GCC unroll kStepsAtOnce
    for (int64_t s = 0; s < piece.steps; ++s, w += w_step) {
      const auto* here = reinterpret_cast<const int32_t*>(w);
      const Sums first = load(here), second = kVectors > 1 ? load(here + kOutputs) : first;
#pragma GCC unroll 12
      for (int t = 0; t < kTokens; ++t) {
        int32_t four;
        memcpy(&four, in[t / 3] + 4 * s + t % 3 * stride, sizeof four);
        const Sums inputs = four - Sums{};
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[t][v] = multiply_add_bytes(inputs, v ? second : first, sum[t][v]);
      }
    }
    if constexpr (!kByRow) add_scaled(piece.scales + b * piece.block_bytes);
  }
  if constexpr (kByRow) add_scaled(piece.scales);
  float sums[kTokens][kVectors * kOutputs];
  for (int t = 0; t < kTokens; ++t)
    for (int v = 0; v < kVectors; ++v) store(sums[t] + v * kOutputs, result[t][v]);
  write_tile<E>(piece, token, output, kTokens, kVectors, sums[0]);
}

template <class E, int kVectors, bool kByRow>
void int8_tiles(const Int8Piece& piece, int64_t output, Fetch& fetch) {
  int64_t t = 0;
#define BLOCKSPARSE_TOKENS(count) \
  for (; t + count <= piece.tokens; t += count) int8_tile<E, count, kVectors, kByRow>(piece, t, output, fetch)
  constexpr int kMost = kByRow ? kRowTokens : kRegisterTokens;
  BLOCKSPARSE_TOKENS(kMost);
  if constexpr (kMost > 6) BLOCKSPARSE_TOKENS(6);
  if constexpr (kMost > 4) BLOCKSPARSE_TOKENS(4);
  BLOCKSPARSE_TOKENS(2);
  BLOCKSPARSE_TOKENS(1);
#undef BLOCKSPARSE_TOKENS
}

#if defined(BLOCKSPARSE_TILES)
// The blocks of a row at the tokens from `token` on, and outputs from `output` on.
struct ByteTerms {
  static constexpr int64_t kLines = 0;
  const uint32_t *x, *w;
  const int32_t* col;
  int64_t x_block, w_block;  // units of a block
  int64_t count, steps, a_row, a_step, a_below, b_row, b_step, b_beside;

  ByteTerms(const Int8Piece& piece, int64_t token, int64_t output, int64_t depth)
      : x(reinterpret_cast<const uint32_t*>(piece.x + token * piece.x_stride)),
        w(reinterpret_cast<const uint32_t*>(piece.w) + output),
        col(piece.col),
        x_block(piece.steps),
        w_block(piece.steps * piece.padded_out),
        count(piece.blocks),
        steps(piece.steps / depth),
        a_row(piece.x_stride / 4),
        a_step(depth),
        a_below(kTile * a_row),
        b_row(piece.padded_out),
        b_step(depth * piece.padded_out),
        b_beside(kTile) {}

  const uint32_t* a(int64_t t) const { return x + col[t] * x_block; }
  const uint32_t* b(int64_t t) const { return w + t * w_block; }
};

// Fewer tokens are bound by reading the weights, and vectors need no transposition.
constexpr int64_t kLeastOnTiles = 8;

// Write kColumns tiles of sums, with the offset and the scale of each output.
template <class E, int kColumns>
__attribute__((noinline)) void write_row_of_tiles(const Int8Piece& piece, int64_t token, int64_t output,
                                                  const int32_t* sums) {
  using Floats = Vector<float>;
  using Storage = typename E::Storage;
  const int64_t tokens = smaller(kTileTokens, piece.tokens - token), at = output - piece.begin;
  const auto* bias = static_cast<const Storage*>(piece.bias);
  auto* y = static_cast<Storage*>(piece.y) + token * piece.y_stride + at;
  Sums offset[kColumns];
  Floats scale[kColumns], shift[kColumns] = {};
  int64_t count[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    const int64_t o = output + c * kTile;
    offset[c] = load(weight_sums(piece.scales, piece.padded_out) + o) * kOffset;
    scale[c] = load(reinterpret_cast<const float*>(piece.scales) + o);
    count[c] = smaller(kTile, piece.end - o);
    if (bias) shift[c] = read_units<E>(bias + at + c * kTile, count[c]);
  }
  for (int64_t t = 0; t < tokens; ++t, sums += kTileOutputs, y += piece.y_stride) {
    const float x_scale = piece.x_scale[token + t];
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) {
      const Sums sum = load(sums + c * kTile) + offset[c];
      Floats v = __builtin_convertvector(sum, Floats) * scale[c] * x_scale;
      if (bias) v += shift[c];
      if (piece.activation != Activation::kNone) v = activated(v, piece.activation);
      Storage* const to = y + c * kTile;
      if (sizeof *to == sizeof v[0] && piece.streams && count[c] == kTile &&
          reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0)
        stream(to, v);
      else
        write_sums<E>(to, v, count[c], false);
    }
  }
}

// Compute a piece with one scale per output: the integers stay in tiles over a whole row of blocks.
template <class E>
void int8_piece_on_tiles(const Int8Piece& piece) {
  const int64_t depth = smaller(kTile, piece.steps);
  int32_t sums[kTileTokens * kTileOutputs];
  configure_tiles(kTile, depth, kTile);
  for (int64_t output = piece.begin; output < piece.end; output += kTileOutputs) {
    const bool both = output + kTile < piece.end;
    for (int64_t t = 0; t < piece.tokens; t += kTileTokens) {
      const int64_t tokens = smaller(kTileTokens, piece.tokens - t);
      const ByteTerms terms(piece, t, output, depth);
      float* const to[2] = {reinterpret_cast<float*>(sums), reinterpret_cast<float*>(sums) + kTile};
      tile_columns<true>(terms, ceil_div(tokens, kTile), both ? 2 : 1, false, to, kTileOutputs);
      finish_stores(sums);
      (both ? write_row_of_tiles<E, 2> : write_row_of_tiles<E, 1>)(piece, t, output, sums);
    }
  }
}
#endif

template <class E, bool kByRow>
void int8_outputs(const Int8Piece& piece) {
  int64_t output = piece.begin;
  const int64_t tiles = ceil_div(piece.end - output, kRegisterVectors * kOutputs) *
                        ceil_div(piece.tokens, kByRow ? kRowTokens : kRegisterTokens);
  const int64_t lines = ceil_div(piece.next_bytes, 64 * tiles * piece.blocks + 1);
  Fetch fetch = {piece.next, piece.next + piece.next_bytes, lines * 64};
  if constexpr (kRegisterVectors == 2)
    for (; output + kOutputs < piece.end; output += 2 * kOutputs) int8_tiles<E, 2, kByRow>(piece, output, fetch);
  for (; output < piece.end; output += kOutputs) int8_tiles<E, 1, kByRow>(piece, output, fetch);
}

template <class E>
void int8_piece(const Int8Piece& piece) {
  if (!piece.by_row) return int8_outputs<E, false>(piece);
#if defined(BLOCKSPARSE_TILES)
  if (fills_tiles(piece.steps) && piece.tokens >= kLeastOnTiles) return int8_piece_on_tiles<E>(piece);
#endif
  int8_outputs<E, true>(piece);
}

typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));

// Take the lowest byte of each lane. Below AVX-512 GCC would convert lane by lane.
template <int... I>
BLOCKSPARSE_INLINE Bytes last_bytes(Vector<uint32_t> v, std::integer_sequence<int, I...>) {
#if defined(__AVX512F__)
  return __builtin_convertvector(v & 255, Bytes);
#else
  const auto all = bits<Vector<uint8_t>>(v);
  return __builtin_shufflevector(all, all, (4 * I)...);
#endif
}

template <class E>
void quantize(const QuantizedRow& row) {
  using Floats = Vector<float>;
  constexpr int n = kLanes<float>;
  const auto* from = static_cast<const typename E::Storage*>(row.from);
  const int64_t features = row.blocks * row.block;
  Floats most = {}, finite = {};
  const auto see = [&](Floats v) __attribute__((always_inline)) {
    const Floats size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    finite += v * 0.0f;
  };
  int64_t i = 0;
  for (; i + n <= features; i += n) see(E::units(from + i));
  if (i < features) see(read_units<E>(from + i, features - i));
  float largest = 0, nothing = 0;
  for (int l = 0; l < n; ++l) {
    largest = most[l] > largest ? most[l] : largest;
    nothing += finite[l];
  }
  *row.scale = largest / 127.0f + nothing;
  const float factor = largest > kLeast ? 127.0f / largest : 0.0f;
  const auto bytes = [&](Floats v, uint8_t* to, int64_t count) __attribute__((always_inline)) {
    // The product is rounded to float32 first, as in the definition: no fused multiply-add.
    Floats scaled = v * factor;
    asm("" : "+m"(scaled));
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the lowest byte.
    const Floats rounded = scaled + 12582912.0f;
    const Bytes found = last_bytes(bits<Vector<uint32_t>>(rounded) + 128, std::make_integer_sequence<int, n>{});
    memcpy(to, &found, count);
  };
  for (int64_t b = 0; b < row.blocks; ++b) {
    uint8_t* to = row.to + b * row.padded;
    const auto* block = from + b * row.block;
    int64_t k = 0;
    for (; k + n <= row.block; k += n) bytes(E::units(block + k), to + k, n);
    if (k < row.block) bytes(read_units<E>(block + k, row.block - k), to + k, row.block - k);
    if (row.padded > row.block) memset(to + row.block, 128, row.padded - row.block);
  }
}

template <class E>
constexpr Int8Kernels table() {
  return {quantize<E>, int8_piece<E>};
}

}  // namespace

const Int8Kernels& select_int8(DType dtype) {
  static constexpr Int8Kernels float32 = table<Float32>(), bfloat16 = table<BFloat16>(), float16 = table<Float16>();
  return by_dtype(dtype, float32, float32, bfloat16, float16);  // float64 is refused by the driver
}

}  // namespace BLOCKSPARSE_ISA
}  // namespace blocksparse
