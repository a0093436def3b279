/* Products of rows and weights for native.c, which says in what they are: float32 where FLOAT32 is defined, else int8. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef FLOAT32
#ifndef __AVX512VL__
#error "this processor has no AVX512-VL"
#endif
typedef float entry;  /* of rows and weights */
typedef float total;  /* of a product */
typedef float kept;   /* of keys and values */
typedef float put_in; /* of rows, as they are multiplied */
#undef __AMX_INT8__
#else
#ifndef __AVX512VNNI__
#error "this processor has no AVX512-VNNI"
#endif
typedef int8_t entry;
typedef int32_t total;
typedef uint16_t kept; /* float16 */
typedef uint8_t put_in;
#endif
#include <immintrin.h>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))

static inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Products. Weights lie in panels of 32 columns, of which in int8 four inputs are side by side:
   [columns / 32][inputs / 4][32][4], in float32 one: [columns / 32][inputs][32]. Inputs are filled up with zeros to a
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
            packed[c / 32 * 32 * n_k + i / BESIDE * 32 * BESIDE + c % 32 * BESIDE + i % BESIDE] = w;
#ifndef FLOAT32
            sum[c] += w;
#endif
        }
}

/* So many inputs of a panel are multiplied by all rows before the next: they stay in the first cache, 16 KiB. */
#define SOME_INPUTS ((int64_t)(512 / sizeof(entry)))

typedef struct {
    const entry *w;
    const int32_t *sum; /* in int8, of each column */
    int64_t n, n_k;     /* inputs, of the n_k of a row */
    int is_first;       /* sums begin with these inputs; else they go on from what is there */
    int64_t n_columns;  /* of `out` */
    const char *next;   /* weights that will be wanted, of which each turn of a tile's loop fetches some: in one go they
                           would wait for each other, and left alone the processor fetches few */
    int64_t pace;       /* bytes of them for each input */
} panel;

#ifdef FLOAT32

/* So many rows, so many vectors of 16 columns. Each sum is added up from the first input to the last. */
INLINE void tile_of(const float *x, const int n_rows, const int n_vectors, panel p, float *out) {
    __m512 sum[11][8];
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_vectors; j++)
            sum[i][j] = p.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + i * p.n_columns + j * 16);
    for (int64_t k = 0; k < p.n; k++) {
        __m512 weight[8];
        _mm_prefetch(p.next + k * p.pace, _MM_HINT_T0);
        for (int j = 0; j < n_vectors; j++)
            weight[j] = _mm512_loadu_ps(p.w + j / 2 * 32 * p.n_k + k * 32 + j % 2 * 16);
        for (int i = 0; i < n_rows; i++) {
            const __m512 all = _mm512_set1_ps(x[i * p.n_k + k]);
            for (int j = 0; j < n_vectors; j++) sum[i][j] = _mm512_fmadd_ps(all, weight[j], sum[i][j]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < n_vectors; j++) _mm512_storeu_ps(out + i * p.n_columns + j * 16, sum[i][j]);
}

INLINE void tile(const float *x, const int n_rows, panel p, float *out) {
    tile_of(x, n_rows, 2, p, out);
}

/* All inputs. */
static inline panel whole_panel(const float *w, int64_t n_k, int64_t n_columns) {
    return (panel){w, NULL, n_k, n_k, 1, n_columns, (const char *)w, 0};
}

/* One row, 32 columns, all inputs. */
static inline void matmul_row(const float *x, int64_t n_k, const float *w, const int32_t *sum, float *out) {
    (void)sum;
    tile(x, 1, whole_panel(w, n_k, 32), out);
}

#else

/* As _mm512_dpbusd_epi32, of which gcc 12 copies each sum to another register and back. */
INLINE void add_dots(__m512i *sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(x), "v"(w));
}

/* It multiplies bytes without a sign by bytes with one: 128 more each, so 128 times the sum of a column less. */
static inline __m512i less_of(const int32_t *sum) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_loadu_si512(sum), 7));
}

/* So many rows, 32 columns. The sums are enough at a time for none to wait for the one before it. */
INLINE void tile(const uint8_t *x, const int n_rows, panel p, int32_t *out) {
    __m512i left[11], right[11];
    for (int i = 0; i < n_rows; i++) {
        left[i] = p.is_first ? less_of(p.sum) : _mm512_loadu_si512(out + i * p.n_columns);
        right[i] = p.is_first ? less_of(p.sum + 16) : _mm512_loadu_si512(out + i * p.n_columns + 16);
    }
    for (int64_t k = 0; k < p.n; k += 4) {
        _mm_prefetch(p.next + k * p.pace, _MM_HINT_T0);
        const __m512i first = _mm512_loadu_si512(p.w + k * 32), second = _mm512_loadu_si512(p.w + k * 32 + 64);
        for (int i = 0; i < n_rows; i++) {
            int32_t four;
            memcpy(&four, x + i * p.n_k + k, 4);
            const __m512i all = _mm512_set1_epi32(four);
            add_dots(left + i, all, first);
            add_dots(right + i, all, second);
        }
    }
    for (int i = 0; i < n_rows; i++) {
        _mm512_storeu_si512(out + i * p.n_columns, left[i]);
        _mm512_storeu_si512(out + i * p.n_columns + 16, right[i]);
    }
}

/* One row, 32 columns, all inputs. Of each two sums, that none waits for the one before it. */
static inline void matmul_row(const uint8_t *x, int64_t n_k, const int8_t *w, const int32_t *sum, int32_t *out) {
    __m512i found[4];
    for (int i = 0; i < 4; i++) found[i] = i < 2 ? less_of(sum + i * 16) : _mm512_setzero_si512();
    for (int64_t k = 0; k < n_k; k += 8)
        for (int i = 0; i < 4; i++) {
            int32_t four;
            memcpy(&four, x + k + i / 2 * 4, 4);
            add_dots(found + i, _mm512_set1_epi32(four), _mm512_loadu_si512(w + (k + i / 2 * 4) * 32 + i % 2 * 64));
        }
    for (int i = 0; i < 2; i++) _mm512_storeu_si512(out + i * 16, _mm512_add_epi32(found[i], found[i + 2]));
}

#endif

/* All inputs of some rows by 32 columns. */
INLINE void matmul_panel(const put_in *x, int64_t n_rows, int64_t n_k, const entry *w, const int32_t *sum,
                        int64_t n_columns, total *out) {
    if (n_rows == 1) matmul_row(x, n_k, w, sum, out);
    if (n_rows < 2) return;
    const int64_t n_last = n_rows >= 8 && n_rows % 8 < 4 ? 8 + n_rows % 8 : n_rows % 8, n_before = n_rows - n_last;
    panel p = {.sum = sum, .n_k = n_k, .n_columns = n_columns};
    p.pace = 32 * (int64_t)sizeof(entry) / (n_before / 8 + 1);
    for (int64_t k = 0; k < n_k; k += p.n) {
        p.w = w + k * 32, p.n = n_k - k < SOME_INPUTS ? n_k - k : SOME_INPUTS, p.is_first = k == 0;
        p.next = (const char *)(p.w + p.n * 32);
        for (int64_t r = 0; r < n_before; r += 8, p.next += p.n * p.pace)
            tile(x + r * n_k + k, 8, p, out + r * n_columns);
        const put_in *rest = x + n_before * n_k + k;
        total *to = out + n_before * n_columns;
        switch (n_last) {
        case 2: tile(rest, 2, p, to); break;
        case 3: tile(rest, 3, p, to); break;
        case 4: tile(rest, 4, p, to); break;
        case 5: tile(rest, 5, p, to); break;
        case 6: tile(rest, 6, p, to); break;
        case 7: tile(rest, 7, p, to); break;
        case 8: tile(rest, 8, p, to); break;
        case 9: tile(rest, 9, p, to); break;
        case 10: tile(rest, 10, p, to); break;
        default: tile(rest, 11, p, to);
        }
    }
}

#ifdef FLOAT32

/* Up to three rows by more columns, so that sums are enough at a time for none to wait for the one before it. How many
   columns are done, a multiple of 32. */
static int64_t matmul_few_rows(const float *x, int64_t n_rows, int64_t n_k, const float *w, int64_t n_columns, float *out) {
    const int64_t n = n_rows == 1 ? 128 : 64;
    int64_t c = 0;
    for (; n_columns - c >= n; c += n) {
        const panel all = whole_panel(w + c * n_k, n_k, n_columns);
        switch (n_rows) {
        case 1: tile_of(x, 1, 8, all, out + c); break;
        case 2: tile_of(x, 2, 4, all, out + c); break;
        default: tile_of(x, 3, 4, all, out + c);
        }
    }
    return c;
}

/* Some columns; `first` is a multiple of 32. Rows of `out` are as long as up(n_columns, 32). */
static void matmul(const float *x, int64_t n_rows, const matrix *m, int64_t first, int64_t n_columns, float *out) {
    const int64_t n_k = up(m->n_in, 64), n_all = up(n_columns, 32);
    const float *w = m->packed + first * n_k;
    int64_t c = n_rows > 0 && n_rows < 4 ? matmul_few_rows(x, n_rows, n_k, w, n_all, out) : 0;
    for (; c < n_all; c += 32) matmul_panel(x, n_rows, n_k, w + c * n_k, NULL, n_all, out + c);
}

/* One row, 32 columns. */
static void matmul_group(const float *x, const matrix *m, int64_t first, float *out) {
    const int64_t n_k = up(m->n_in, 64);
    matmul_row(x, n_k, m->packed + first * n_k, NULL, out);
}

#else

/* Rows are computed 32 at a time, so as many must be there; what is past the last is anything. */
#ifdef __AMX_INT8__
static void matmul_amx(const int8_t *x, int64_t n_rows, int64_t n_k, const int8_t *w, int64_t n_columns, int32_t *out) {
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
                _tile_loadd(6, right + k * 32, 128);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(7, right + k * 32 + 64, 128);
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

static inline void without_sign(const int8_t *x, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)x[i] ^ 0x80;
}

static void matmul_vnni(const int8_t *x, int64_t n_all, int64_t n_k, const int8_t *w, const int32_t *sum,
                       int64_t n_columns, int32_t *out) {
    const int64_t some = n_k <= 2048 ? 128 : n_k <= 4096 ? 64 : 8; /* rows without signs at a time, on the stack */
    uint8_t more[(n_all < some ? n_all : some) * n_k];
    for (int64_t begin = 0; begin < n_all; begin += some) {
        const int64_t n_rows = n_all - begin < some ? n_all - begin : some;
        without_sign(x + begin * n_k, n_rows * n_k, more);
        for (int64_t c = 0; c < n_columns; c += 32)
            matmul_panel(more, n_rows, n_k, w + c * n_k, sum + c, n_columns, out + begin * n_columns + c);
    }
}

/* Some columns; `first` is a multiple of 32. Rows of `out` are as long as up(n_columns, 32). */
static void matmul(const int8_t *x, int64_t n_rows, const matrix *m, int64_t first, int64_t n_columns, int32_t *out) {
    int64_t n_k = up(m->n_in, 64);
    const int8_t *w = m->packed + first * n_k;
    n_columns = up(n_columns, 32);
#ifdef __AMX_INT8__
    if (has_amx()) {
        matmul_amx(x, n_rows, n_k, w, n_columns, out);
        return;
    }
#endif
    matmul_vnni(x, n_rows, n_k, w, m->sum + first, n_columns, out);
}

/* One row, 32 columns. */
static void matmul_group(const int8_t *x, const matrix *m, int64_t first, int32_t *out) {
    const int64_t n_k = up(m->n_in, 64);
    uint8_t own[n_k];
    without_sign(x, n_k, own);
    matmul_row(own, n_k, m->packed + first * n_k, m->sum + first, out);
}

#endif
