/* Products of rows and weights for native.c, which says in what they are: float32 where FLOAT32 is defined, else int8. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef FLOAT32
#ifndef __AVX512F__
#error "this processor has no AVX512"
#endif
typedef float entry; /* of rows and weights */
typedef float total; /* of a product */
typedef float kept;  /* of keys and values */
#undef __AMX_INT8__
#else
#ifndef __AVX512VNNI__
#error "this processor has no AVX512-VNNI"
#endif
typedef int8_t entry;
typedef int32_t total;
typedef uint16_t kept; /* float16 */
#endif
#include <immintrin.h>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Products. Weights lie in panels of 16 columns, of which in int8 four inputs are side by side:
   [columns / 16][inputs / 4][16][4], in float32 one: [columns / 16][inputs][16]. Inputs are filled up with zeros to a
   multiple of 64, and so are rows; columns to a multiple of 32. */

#define BESIDE ((int64_t)(4 / sizeof(entry)))

typedef struct {
    const entry *packed;
    const int32_t *sum; /* of each column, in int8 */
    const float *scale; /* of each column, in int8 */
    const float *bias;  /* of each column, or none */
    int64_t n_in, n_out;
} matrix;

void pack(const entry *columns, int64_t n_in, int64_t n_out, entry *packed, int32_t *sum) {
    int64_t n_k = up(n_in, 64);
    memset(packed, 0, n_k * up(n_out, 32) * sizeof(entry));
    memset(sum, 0, up(n_out, 32) * sizeof(int32_t));
    for (int64_t c = 0; c < n_out; c++)
        for (int64_t i = 0; i < n_in; i++) {
            entry w = columns[c * n_in + i];
            packed[c / 16 * 16 * n_k + i / BESIDE * 16 * BESIDE + c % 16 * BESIDE + i % BESIDE] = w;
#ifndef FLOAT32
            sum[c] += w;
#endif
        }
}

#ifdef FLOAT32

/* So many rows, so many vectors of 16 columns. Each sum is added up from the first input to the last. */
static inline __attribute__((always_inline)) void tile(const float *x, const int n_rows, const int n_panels, int64_t n_k,
                                                       const float *w, int64_t n_columns, float *out) {
    __m512 sum[8][8];
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_panels; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < n_k; k++) {
        __m512 weight[8];
        for (int j = 0; j < n_panels; j++) weight[j] = _mm512_loadu_ps(w + (j * n_k + k) * 16);
        for (int i = 0; i < n_rows; i++) {
            const __m512 all = _mm512_set1_ps(x[i * n_k + k]);
            for (int j = 0; j < n_panels; j++) sum[i][j] = _mm512_fmadd_ps(all, weight[j], sum[i][j]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_panels; j++) _mm512_storeu_ps(out + i * n_columns + j * 16, sum[i][j]);
}

/* Some columns; `first` is a multiple of 32. Rows of `out` are as long as up(n_columns, 32). */
static void times(const float *x, int64_t n_rows, const matrix *m, int64_t first, int64_t n_columns, float *out) {
    const int64_t n_k = up(m->n_in, 64), n_all = up(n_columns, 32);
    for (int64_t c = 0; c < n_all;) {
        const float *w = m->packed + (first + c) * n_k;
        int64_t r = 0;
        for (; n_rows - r >= 8; r += 8) tile(x + r * n_k, 8, 2, n_k, w, n_all, out + r * n_all + c);
        for (; n_rows - r >= 4; r += 4) tile(x + r * n_k, 4, 2, n_k, w, n_all, out + r * n_all + c);
        if (n_rows < 4 && n_all - c >= 128) { /* sums enough at a time for none to wait for the one before it */
            for (; r < n_rows; r++) tile(x + r * n_k, 1, 8, n_k, w, n_all, out + r * n_all + c);
            c += 128;
            continue;
        }
        for (; r < n_rows; r++) tile(x + r * n_k, 1, 2, n_k, w, n_all, out + r * n_all + c);
        c += 32;
    }
}

/* One row, 32 columns. */
static void times_group(const float *x, const matrix *m, int64_t first, float *out) {
    const int64_t n_k = up(m->n_in, 64);
    tile(x, 1, 2, n_k, m->packed + first * n_k, 32, out);
}

#else

/* Rows are computed 32 at a time, so as many must be there; what is past the last is anything. */
#ifdef __AMX_INT8__
static void times_amx(const int8_t *x, int64_t n_rows, int64_t n_k, const int8_t *w, int64_t n_columns, int32_t *out) {
    struct { uint8_t palette, start, reserved[14]; uint16_t n_bytes[16]; uint8_t n_rows[16]; } config, before;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) { config.n_bytes[i] = 64; config.n_rows[i] = 16; }
    _tile_storeconfig(&before); /* another library's, which may not look before it goes on */
    _tile_loadconfig(&config);
    int64_t stride = n_columns * sizeof(int32_t);
    for (int64_t c = 0; c < n_columns; c += 32)
        for (int64_t r = 0; r < n_rows; r += 32) {
            const int8_t *left = x + r * n_k, *right = w + c * n_k;
            const int is_tall = n_rows - r > 16;
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int64_t k = 0; k < n_k; k += 64) {
                _tile_loadd(4, left + k, n_k);
                _tile_loadd(6, right + k * 16, 64);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(7, right + n_k * 16 + k * 16, 64);
                _tile_dpbssd(1, 4, 7);
                if (!is_tall) continue;
                _tile_loadd(5, left + 16 * n_k + k, n_k);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            int32_t *to = out + r * n_columns + c;
            _tile_stored(0, to, stride);
            _tile_stored(1, to + 16, stride);
            if (!is_tall) continue;
            _tile_stored(2, to + 16 * n_columns, stride);
            _tile_stored(3, to + 16 * n_columns + 16, stride);
        }
    if (before.palette) _tile_loadconfig(&before); else _tile_release();
}

/* The system must be asked for the tiles, once by each process; 18 is their number among its features. */
static int has_amx(void) {
    static int known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return known;
}
#endif

/* As _mm512_dpbusd_epi32, of which gcc 12 copies each sum to another register and back. */
static inline __attribute__((always_inline)) void add_dots(__m512i *sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(w));
}

/* So many rows, 32 columns. The sums are enough at a time for none to wait for the one before it. */
static inline __attribute__((always_inline)) void tile_vnni(const uint8_t *x, const int n_rows, int64_t n_k,
                                                            const int8_t *w, const int32_t *sum, int64_t n_columns,
                                                            int32_t *out) {
    __m512i left[8], right[8];
    for (int i = 0; i < n_rows; i++) left[i] = right[i] = _mm512_setzero_si512();
    for (int64_t k = 0; k < n_k; k += 4) {
        const __m512i first = _mm512_loadu_si512(w + k * 16), second = _mm512_loadu_si512(w + (n_k + k) * 16);
        for (int i = 0; i < n_rows; i++) {
            int32_t four;
            memcpy(&four, x + i * n_k + k, 4);
            const __m512i all = _mm512_set1_epi32(four);
            add_dots(left + i, all, first);
            add_dots(right + i, all, second);
        }
    }
    const __m512i less = _mm512_slli_epi32(_mm512_loadu_si512(sum), 7);
    const __m512i less_right = _mm512_slli_epi32(_mm512_loadu_si512(sum + 16), 7);
    for (int i = 0; i < n_rows; i++) {
        _mm512_storeu_si512(out + i * n_columns, _mm512_sub_epi32(left[i], less));
        _mm512_storeu_si512(out + i * n_columns + 16, _mm512_sub_epi32(right[i], less_right));
    }
}

/* One row, 32 columns. Of each two sums, that none waits for the one before it. */
static inline void times_one(const uint8_t *x, int64_t n_k, const int8_t *w, const int32_t *sum, int32_t *out) {
    __m512i found[4];
    for (int i = 0; i < 4; i++) found[i] = _mm512_setzero_si512();
    for (int64_t k = 0; k < n_k; k += 8)
        for (int i = 0; i < 4; i++) {
            int32_t four;
            memcpy(&four, x + k + i / 2 * 4, 4);
            add_dots(found + i, _mm512_set1_epi32(four), _mm512_loadu_si512(w + (i % 2 * n_k + k + i / 2 * 4) * 16));
        }
    for (int i = 0; i < 2; i++) {
        const __m512i less = _mm512_slli_epi32(_mm512_loadu_si512(sum + i * 16), 7);
        _mm512_storeu_si512(out + i * 16, _mm512_sub_epi32(_mm512_add_epi32(found[i], found[i + 2]), less));
    }
}

static inline void without_sign(const int8_t *x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)x[i] ^ 0x80;
}

/* It multiplies bytes without a sign by bytes with one: 128 more each, and 128 times the sum of a column less. */
static void times_vnni(const int8_t *x, int64_t n_all, int64_t n_k, const int8_t *w, const int32_t *sum,
                       int64_t n_columns, int32_t *out) {
    const int64_t some = n_k <= 4096 ? 64 : 8; /* rows without signs at a time, on the stack */
    uint8_t more[(n_all < some ? n_all : some) * n_k];
    for (int64_t begin = 0; begin < n_all; begin += some) {
        const int64_t n_rows = n_all - begin < some ? n_all - begin : some;
        without_sign(x + begin * n_k, n_rows * n_k, more);
        for (int64_t c = 0; c < n_columns; c += 32) {
            const int8_t *panel = w + c * n_k;
            int32_t *to = out + begin * n_columns + c;
            int64_t r = 0;
            for (; n_rows - r >= 8; r += 8)
                tile_vnni(more + r * n_k, 8, n_k, panel, sum + c, n_columns, to + r * n_columns);
            for (; n_rows - r >= 4; r += 4)
                tile_vnni(more + r * n_k, 4, n_k, panel, sum + c, n_columns, to + r * n_columns);
            for (; r < n_rows; r++) times_one(more + r * n_k, n_k, panel, sum + c, to + r * n_columns);
        }
    }
}

/* Some columns; `first` is a multiple of 32. Rows of `out` are as long as up(n_columns, 32). */
static void times(const int8_t *x, int64_t n_rows, const matrix *m, int64_t first, int64_t n_columns, int32_t *out) {
    int64_t n_k = up(m->n_in, 64);
    const int8_t *w = m->packed + first * n_k;
    n_columns = up(n_columns, 32);
#ifdef __AMX_INT8__
    if (has_amx()) {
        times_amx(x, n_rows, n_k, w, n_columns, out);
        return;
    }
#endif
    times_vnni(x, n_rows, n_k, w, m->sum + first, n_columns, out);
}

/* One row, 32 columns. */
static void times_group(const int8_t *x, const matrix *m, int64_t first, int32_t *out) {
    const int64_t n_k = up(m->n_in, 64);
    uint8_t own[n_k];
    without_sign(x, n_k, own);
    times_one(own, n_k, m->packed + first * n_k, m->sum + first, out);
}

#endif
