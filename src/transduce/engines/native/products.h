/* Products of rows and weights for native.c: in float32 if FLOAT32 is defined, else in int8. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef FLOAT32
#ifndef __AVX512VL__
#error "this processor has no AVX512-VL"
#endif
typedef float element_t; /* one element of a quantised row or of a weight matrix */
typedef float sum_t;     /* one element of a product */
typedef float kv_t;      /* one element of a stored key or value */
typedef float input_t;   /* one element of a row in the form that the kernels multiply */
#undef __AMX_INT8__
#else
#ifndef __AVX512VNNI__
#error "this processor has no AVX512-VNNI"
#endif
typedef int8_t element_t;
typedef int32_t sum_t;
typedef uint16_t kv_t; /* float16 */
typedef uint8_t input_t;
#endif
#include <immintrin.h>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Weights are packed into panels of 32 columns: [columns / 32][inputs][32] in float32. In int8, four inputs of a column
   are adjacent, as VNNI and AMX require: [columns / 32][inputs / 4][32][4]. Columns are padded with zeros to a multiple
   of 32, inputs to a multiple of 64. Rows are padded to the same number of inputs. */

#define N_ADJACENT ((int64_t)(4 / sizeof(element_t)))

typedef struct {
    const element_t *packed;
    const int32_t *column_sum; /* int8 only */
    const float *scale;        /* of each column; int8 only */
    const float *bias;         /* of each column, or NULL */
    int64_t n_in, n_out;
} matrix_t;

/* `columns`: n_out x n_in. */
void pack(const element_t *columns, int64_t n_in, int64_t n_out, element_t *packed, int32_t *column_sum) {
    int64_t n_k = round_up(n_in, 64);
    memset(packed, 0, n_k * round_up(n_out, 32) * sizeof(element_t));
    memset(column_sum, 0, round_up(n_out, 32) * sizeof(int32_t));
    for (int64_t c = 0; c < n_out; c++)
        for (int64_t i = 0; i < n_in; i++) {
            element_t w = columns[c * n_in + i];
            packed[c / 32 * 32 * n_k + i / N_ADJACENT * 32 * N_ADJACENT + c % 32 * N_ADJACENT + i % N_ADJACENT] = w;
#ifndef FLOAT32
            column_sum[c] += w;
#endif
        }
}

/* This many inputs of a panel are multiplied by all rows before the next inputs: 16 KiB, which stay in the L1 cache. */
#define INPUTS_PER_PASS ((int64_t)(512 / sizeof(element_t)))

/* A range of inputs of one panel. */
typedef struct {
    const element_t *w;
    const int32_t *column_sum; /* int8 only */
    int64_t n, n_k;            /* inputs in this range, and inputs in a whole row */
    int is_first;              /* 1: sums start with these inputs; 0: they continue from `out` */
    int64_t n_columns;         /* length of a row of `out` */
    const char *prefetch;      /* weights to prefetch, a few in each iteration of a tile's loop: prefetching all at once
                                  would stall, and the hardware prefetcher alone fetches too few */
    int64_t prefetch_stride;   /* bytes to prefetch per input */
} panel_t;

#ifdef FLOAT32

/* n_rows rows by n_vectors vectors of 16 columns. Each sum is accumulated from the first input to the last. */
INLINE void multiply_vectors(const float *x, const int n_rows, const int n_vectors, panel_t p, float *out) {
    __m512 sum[11][8];
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_vectors; j++)
            sum[i][j] = p.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + i * p.n_columns + j * 16);
    for (int64_t k = 0; k < p.n; k++) {
        __m512 weight[8];
        _mm_prefetch(p.prefetch + k * p.prefetch_stride, _MM_HINT_T0);
        for (int j = 0; j < n_vectors; j++)
            weight[j] = _mm512_loadu_ps(p.w + j / 2 * 32 * p.n_k + k * 32 + j % 2 * 16);
        for (int i = 0; i < n_rows; i++) {
            const __m512 input = _mm512_set1_ps(x[i * p.n_k + k]);
            for (int j = 0; j < n_vectors; j++) sum[i][j] = _mm512_fmadd_ps(input, weight[j], sum[i][j]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_vectors; j++) _mm512_storeu_ps(out + i * p.n_columns + j * 16, sum[i][j]);
}

/* n_rows rows by 32 columns. */
INLINE void multiply_tile(const float *x, const int n_rows, panel_t p, float *out) {
    multiply_vectors(x, n_rows, 2, p, out);
}

/* All inputs of a panel, with nothing to prefetch. */
static inline panel_t whole_panel(const float *w, int64_t n_k, int64_t n_columns) {
    return (panel_t){w, NULL, n_k, n_k, 1, n_columns, (const char *)w, 0};
}

/* One row by 32 columns, all inputs. */
static inline void multiply_row(const float *x, int64_t n_k, const float *w, const int32_t *column_sum, float *out) {
    (void)column_sum;
    multiply_tile(x, 1, whole_panel(w, n_k, 32), out);
}

#else

/* Equals _mm512_dpbusd_epi32. For the intrinsic, gcc 12 copies each sum to another register and back. */
INLINE void dpbusd(__m512i *sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(w));
}

/* The initial value of the sums. vpdpbusd multiplies unsigned by signed bytes, so 128 is added to each input (see
   `to_unsigned`); starting at -128 times the sum of the column cancels that. */
static inline __m512i initial_sum(const int32_t *column_sum) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_loadu_si512(column_sum), 7));
}

/* n_rows rows by 32 columns: two independent sums per row, which hides the latency of vpdpbusd. */
INLINE void multiply_tile(const uint8_t *x, const int n_rows, panel_t p, int32_t *out) {
    __m512i left[11], right[11];
    for (int i = 0; i < n_rows; i++) {
        left[i] = p.is_first ? initial_sum(p.column_sum) : _mm512_loadu_si512(out + i * p.n_columns);
        right[i] = p.is_first ? initial_sum(p.column_sum + 16) : _mm512_loadu_si512(out + i * p.n_columns + 16);
    }
    for (int64_t k = 0; k < p.n; k += 4) {
        _mm_prefetch(p.prefetch + k * p.prefetch_stride, _MM_HINT_T0);
        const __m512i w_left = _mm512_loadu_si512(p.w + k * 32), w_right = _mm512_loadu_si512(p.w + k * 32 + 64);
        for (int i = 0; i < n_rows; i++) {
            int32_t four_inputs;
            memcpy(&four_inputs, x + i * p.n_k + k, 4);
            const __m512i inputs = _mm512_set1_epi32(four_inputs);
            dpbusd(left + i, inputs, w_left);
            dpbusd(right + i, inputs, w_right);
        }
    }
    for (int i = 0; i < n_rows; i++) {
        _mm512_storeu_si512(out + i * p.n_columns, left[i]);
        _mm512_storeu_si512(out + i * p.n_columns + 16, right[i]);
    }
}

/* One row by 32 columns, all inputs. Even and odd groups of four inputs have separate sums, which hides the latency of
   vpdpbusd. */
static inline void multiply_row(const uint8_t *x, int64_t n_k, const int8_t *w, const int32_t *column_sum,
                                int32_t *out) {
    __m512i sum[4];
    for (int i = 0; i < 4; i++) sum[i] = i < 2 ? initial_sum(column_sum + i * 16) : _mm512_setzero_si512();
    for (int64_t k = 0; k < n_k; k += 8)
        for (int i = 0; i < 4; i++) {
            int32_t four_inputs;
            memcpy(&four_inputs, x + k + i / 2 * 4, 4);
            const __m512i weights = _mm512_loadu_si512(w + (k + i / 2 * 4) * 32 + i % 2 * 64);
            dpbusd(sum + i, _mm512_set1_epi32(four_inputs), weights);
        }
    for (int i = 0; i < 2; i++) _mm512_storeu_si512(out + i * 16, _mm512_add_epi32(sum[i], sum[i + 2]));
}

#endif

/* All inputs of n_rows rows by 32 columns. Rows are multiplied in tiles of 8. If 1 to 3 rows remain, they join the last
   full tile, so the last tile has up to 11 rows. */
INLINE void multiply_panel(const input_t *x, int64_t n_rows, int64_t n_k, const element_t *w,
                           const int32_t *column_sum, int64_t n_columns, sum_t *out) {
    if (n_rows == 1) multiply_row(x, n_k, w, column_sum, out);
    if (n_rows < 2) return;
    const int64_t n_last = n_rows >= 8 && n_rows % 8 < 4 ? 8 + n_rows % 8 : n_rows % 8, n_before = n_rows - n_last;
    panel_t p = {.column_sum = column_sum, .n_k = n_k, .n_columns = n_columns};
    p.prefetch_stride = 32 * (int64_t)sizeof(element_t) / (n_before / 8 + 1);
    for (int64_t k = 0; k < n_k; k += p.n) {
        p.w = w + k * 32, p.n = n_k - k < INPUTS_PER_PASS ? n_k - k : INPUTS_PER_PASS, p.is_first = k == 0;
        p.prefetch = (const char *)(p.w + p.n * 32);
        for (int64_t r = 0; r < n_before; r += 8, p.prefetch += p.n * p.prefetch_stride)
            multiply_tile(x + r * n_k + k, 8, p, out + r * n_columns);
        const input_t *x_last = x + n_before * n_k + k;
        sum_t *out_last = out + n_before * n_columns;
        switch (n_last) {
        case 2: multiply_tile(x_last, 2, p, out_last); break;
        case 3: multiply_tile(x_last, 3, p, out_last); break;
        case 4: multiply_tile(x_last, 4, p, out_last); break;
        case 5: multiply_tile(x_last, 5, p, out_last); break;
        case 6: multiply_tile(x_last, 6, p, out_last); break;
        case 7: multiply_tile(x_last, 7, p, out_last); break;
        case 8: multiply_tile(x_last, 8, p, out_last); break;
        case 9: multiply_tile(x_last, 9, p, out_last); break;
        case 10: multiply_tile(x_last, 10, p, out_last); break;
        default: multiply_tile(x_last, 11, p, out_last);
        }
    }
}

#ifdef FLOAT32

/* Up to three rows by 64 or 128 columns at a time, so that there are enough independent sums to hide the latency of
   multiply-adds. Returns the number of columns computed, a multiple of 32. */
static int64_t multiply_few_rows(const float *x, int64_t n_rows, int64_t n_k, const float *w, int64_t n_columns,
                                 float *out) {
    const int64_t n = n_rows == 1 ? 128 : 64;
    int64_t c = 0;
    for (; n_columns - c >= n; c += n) {
        const panel_t panel = whole_panel(w + c * n_k, n_k, n_columns);
        switch (n_rows) {
        case 1: multiply_vectors(x, 1, 8, panel, out + c); break;
        case 2: multiply_vectors(x, 2, 4, panel, out + c); break;
        default: multiply_vectors(x, 3, 4, panel, out + c);
        }
    }
    return c;
}

/* Columns from `first`, a multiple of 32. A row of `out` has round_up(n_columns, 32) elements. */
static void matmul(const float *x, int64_t n_rows, const matrix_t *m, int64_t first, int64_t n_columns, float *out) {
    const int64_t n_k = round_up(m->n_in, 64), n_padded = round_up(n_columns, 32);
    const float *w = m->packed + first * n_k;
    int64_t c = n_rows > 0 && n_rows < 4 ? multiply_few_rows(x, n_rows, n_k, w, n_padded, out) : 0;
    for (; c < n_padded; c += 32) multiply_panel(x, n_rows, n_k, w + c * n_k, NULL, n_padded, out + c);
}

/* One row by the 32 columns from `first`. */
static void matmul_group(const float *x, const matrix_t *m, int64_t first, float *out) {
    const int64_t n_k = round_up(m->n_in, 64);
    multiply_row(x, n_k, m->packed + first * n_k, NULL, out);
}

#else

/* Rows are computed 32 at a time: `x` and `out` have room for that many, and rows past the last are undefined. */
#ifdef __AMX_INT8__
static void matmul_amx(const int8_t *x, int64_t n_rows, int64_t n_k, const int8_t *w, int64_t n_columns,
                       int32_t *out) {
    struct { uint8_t palette, start, reserved[14]; uint16_t n_bytes[16]; uint8_t n_rows[16]; } config, saved;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) { config.n_bytes[i] = 64; config.n_rows[i] = 16; }
    _tile_storeconfig(&saved); /* another library may use the tiles later without configuring them again */
    _tile_loadconfig(&config);
    int64_t stride = n_columns * sizeof(int32_t);
    for (int64_t c = 0; c < n_columns; c += 32)
        for (int64_t r = 0; r < n_rows; r += 32) {
            const int8_t *left = x + r * n_k, *right = w + c * n_k;
            const int is_tall = n_rows - r > 16;
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int64_t k = 0; k < n_k; k += 64) {
                _tile_loadd(4, left + k, n_k);
                _tile_loadd(6, right + k * 32, 128);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(7, right + k * 32 + 64, 128);
                _tile_dpbssd(1, 4, 7);
                if (!is_tall) continue;
                _tile_loadd(5, left + 16 * n_k + k, n_k);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            int32_t *tile_out = out + r * n_columns + c;
            _tile_stored(0, tile_out, stride);
            _tile_stored(1, tile_out + 16, stride);
            if (!is_tall) continue;
            _tile_stored(2, tile_out + 16 * n_columns, stride);
            _tile_stored(3, tile_out + 16 * n_columns + 16, stride);
        }
    if (saved.palette) _tile_loadconfig(&saved); else _tile_release();
}

/* Whether Linux lets this process use the tiles, which each process must request once. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int is_permitted = -1;
    if (is_permitted < 0) is_permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_permitted;
}
#endif

/* Adds 128 to each element. */
static inline void to_unsigned(const int8_t *x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)x[i] ^ 0x80;
}

static void matmul_vnni(const int8_t *x, int64_t n_rows, int64_t n_k, const int8_t *w, const int32_t *column_sum,
                        int64_t n_columns, int32_t *out) {
    const int64_t max_rows = n_k <= 2048 ? 128 : n_k <= 4096 ? 64 : 8; /* limits the buffer, which is on the stack */
    uint8_t x_unsigned[(n_rows < max_rows ? n_rows : max_rows) * n_k];
    for (int64_t begin = 0; begin < n_rows; begin += max_rows) {
        const int64_t n = n_rows - begin < max_rows ? n_rows - begin : max_rows;
        to_unsigned(x + begin * n_k, n * n_k, x_unsigned);
        for (int64_t c = 0; c < n_columns; c += 32)
            multiply_panel(x_unsigned, n, n_k, w + c * n_k, column_sum + c, n_columns, out + begin * n_columns + c);
    }
}

/* Columns from `first`, a multiple of 32. A row of `out` has round_up(n_columns, 32) elements. */
static void matmul(const int8_t *x, int64_t n_rows, const matrix_t *m, int64_t first, int64_t n_columns,
                   int32_t *out) {
    int64_t n_k = round_up(m->n_in, 64);
    const int8_t *w = m->packed + first * n_k;
    n_columns = round_up(n_columns, 32);
#ifdef __AMX_INT8__
    if (has_amx()) {
        matmul_amx(x, n_rows, n_k, w, n_columns, out);
        return;
    }
#endif
    matmul_vnni(x, n_rows, n_k, w, m->column_sum + first, n_columns, out);
}

/* One row by the 32 columns from `first`. */
static void matmul_group(const int8_t *x, const matrix_t *m, int64_t first, int32_t *out) {
    const int64_t n_k = round_up(m->n_in, 64);
    uint8_t x_unsigned[n_k];
    to_unsigned(x, n_k, x_unsigned);
    multiply_row(x_unsigned, n_k, m->packed + first * n_k, m->column_sum + first, out);
}

#endif
