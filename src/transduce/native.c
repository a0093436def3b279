/* An int8 Transformer, encoder and decoder step, without a word to Python in between. Compiled by native.py.

   Rows are int8, each with a scale of its own, and so are columns of weights; products are whole numbers, which times
   both scales, plus a bias, are what float32 would have been. Sentences go through all layers some at a time, so that
   what passes from one product to the next stays in the cache of a core. All is the work of one thread. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __AVX512VNNI__
#error "this processor has no AVX512-VNNI"
#endif
#include <immintrin.h>
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define GROUP 32       /* tokens of a group, as in peaks.py */
#define BLOCK 512      /* columns of logits that are found together */
#define MANY_ROWS 128  /* that go through the layers together */
#define LOWEST -3e38f  /* for -inf, which the compiler is told not to expect */

static inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Products. Weights lie in panels of 16 columns, four inputs of each side by side: [columns / 16][inputs / 4][16][4].
   Inputs are filled up with zeros to a multiple of 64, and so are rows; columns to a multiple of 32. */

typedef struct {
    const int8_t *packed;
    const int32_t *sum; /* of each column */
    const float *scale; /* of each column */
    const float *bias;  /* of each column, or none */
    int64_t n_in, n_out;
} matrix;

void pack(const int8_t *columns, int64_t n_in, int64_t n_out, int8_t *packed, int32_t *sum) {
    int64_t n_k = up(n_in, 64);
    memset(packed, 0, n_k * up(n_out, 32));
    memset(sum, 0, up(n_out, 32) * sizeof(int32_t));
    for (int64_t c = 0; c < n_out; c++)
        for (int64_t i = 0; i < n_in; i++) {
            int8_t w = columns[c * n_in + i];
            packed[c / 16 * 16 * n_k + i / 4 * 64 + c % 16 * 4 + i % 4] = w;
            sum[c] += w;
        }
}

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

#define SOME_ROWS 64 /* without signs at a time */

/* It multiplies bytes without a sign by bytes with one: 128 more each, and 128 times the sum of a column less. */
static void times_vnni(const int8_t *x, int64_t n_all, int64_t n_k, const int8_t *w, const int32_t *sum,
                       int64_t n_columns, int32_t *out) {
    uint8_t more[(n_all < SOME_ROWS ? n_all : SOME_ROWS) * n_k];
    for (int64_t begin = 0; begin < n_all; begin += SOME_ROWS) {
        const int64_t n_rows = n_all - begin < SOME_ROWS ? n_all - begin : SOME_ROWS;
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

/* For a test. */
void multiply(const int8_t *x, int64_t n_rows, const matrix *m, int32_t *out) { times(x, n_rows, m, 0, m->n_out, out); }

/* Rows */

static inline float most(const float *x, int64_t n) {
    float found = LOWEST;
    for (int64_t i = 0; i < n; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* e^x for x <= 0: 2^k e^r with |r| <= ln(2) / 2, by the first terms of its series. Off by less than 3e-7 of it. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float k = rintf(x * 1.44269504f), r = x - k * 0.693145752f - k * 1.42860677e-6f;
    float y = 0.0416666667f + r * (8.33333333e-3f + r * 1.38888889e-3f);
    y = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * y)));
    union { int32_t i; float f; } power = {((int32_t)k + 127) << 23};
    return y * power.f;
}

static inline void real(const int32_t *restrict whole, float row_scale, const matrix *m, int64_t first, int64_t n,
                        float *restrict out) {
    const float *restrict scale = m->scale + first;
    for (int64_t i = 0; i < n; i++) out[i] = (float)whole[i] * row_scale * scale[i];
    if (m->bias)
        for (int64_t i = 0; i < n; i++) out[i] += m->bias[first + i];
}

static inline void quantise(const float *restrict x, int64_t n, int8_t *restrict out, float *scale) {
    float top = 1e-12f * 127;
    for (int64_t i = 0; i < n; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    float factor = 127.0f / top;
    for (int64_t i = 0; i < n; i++) out[i] = (int8_t)rintf(x[i] * factor);
    memset(out + n, 0, up(n, 64) - n);
    *scale = top / 127.0f;
}

static inline void softmax(float *score, int64_t n) {
    float top = most(score, n), sum = 0;
    for (int64_t i = 0; i < n; i++) score[i] = exp_of(score[i] - top);
    for (int64_t i = 0; i < n; i++) sum += score[i];
    for (int64_t i = 0; i < n; i++) score[i] /= sum;
}

#define LANES 16
#define REST(n) ((n) >= LANES ? 0xffff : (1u << (n)) - 1) /* of a vector, what is left */

static inline float dot(const float *x, const float *y, int64_t n) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES)
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(REST(n - i), x + i), _mm512_maskz_loadu_ps(REST(n - i), y + i), sum);
    return _mm512_reduce_add_ps(sum);
}

/* Rows, each times a weight, added up. Rows are those that `which` says, or all. Four sums at a time, so that none waits
   for the one before it: of four vectors, or where a row is one vector of every fourth row. */
static inline __attribute__((always_inline)) void mix(const float *weight, int64_t n, const float *rows, int64_t stride,
                                                      const int64_t *which, int64_t width, float *out) {
#define ROW(j) (rows + (which ? which[j] : (j)) * stride)
    if (width <= LANES) {
        const __mmask16 is_in = REST(width);
        __m512 sum[4];
        for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
        int64_t j = 0;
        for (; n - j >= 4; j += 4)
            for (int i = 0; i < 4; i++)
                sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[j + i]), _mm512_maskz_loadu_ps(is_in, ROW(j + i)), sum[i]);
        for (; j < n; j++)
            sum[0] = _mm512_fmadd_ps(_mm512_set1_ps(weight[j]), _mm512_maskz_loadu_ps(is_in, ROW(j)), sum[0]);
        _mm512_mask_storeu_ps(out, is_in, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
        return;
    }
    for (int64_t first = 0; first < width; first += 4 * LANES) {
        __m512 sum[4];
        __mmask16 is_in[4];
        for (int i = 0; i < 4; i++) {
            const int64_t left = width - first - i * LANES;
            is_in[i] = left <= 0 ? 0 : REST(left);
            sum[i] = _mm512_setzero_ps();
        }
        for (int64_t j = 0; j < n; j++) {
            const float *row = ROW(j) + first;
            const __m512 by = _mm512_set1_ps(weight[j]);
            for (int i = 0; i < 4; i++)
                sum[i] = _mm512_fmadd_ps(by, _mm512_maskz_loadu_ps(is_in[i], row + i * LANES), sum[i]);
        }
        for (int i = 0; i < 4; i++) _mm512_mask_storeu_ps(out + first + i * LANES, is_in[i], sum[i]);
    }
#undef ROW
}

/* The model */

typedef struct { const float *gain, *bias; float eps; } norm;

typedef struct {
    matrix Q_KV; /* queries of all heads, divided by the root of d_k; then key and value of each head */
    matrix O;
    norm attending;
    matrix memory_Q, memory_KV, memory_O; /* the decoder's alone */
    norm asking;
    matrix one, two;
    norm thinking;
} layer;

typedef struct {
    const layer *encoder, *decoder;
    matrix output;
    int64_t n_encoder, n_decoder, n_heads, d_k, d_v, d_model, d_ff;
} model;

/* What some rows are on their way through the layers. */
typedef struct {
    int8_t *x, *wide; /* rows of d_model, and of whatever stands between two products of a sub-layer */
    float *x_scale, *wide_scale;
    int32_t *whole;
    int64_t n_x, n_wide; /* length of a row */
} work;

static work work_for(const model *m, int64_t n_rows) {
    int64_t n = up(n_rows, 32), n_head = m->n_heads * m->d_v, n_qkv = m->n_heads * (2 * m->d_k + m->d_v);
    int64_t n_wide = up(m->d_ff > n_head ? m->d_ff : n_head, 64), n_whole = n_qkv > n_wide ? n_qkv : n_wide;
    n_whole = n_whole > m->d_model ? n_whole : m->d_model;
    n_whole = n_whole > BLOCK ? n_whole : BLOCK;
    work w = {.n_x = up(m->d_model, 64), .n_wide = n_wide};
    w.x = calloc(n, w.n_x);
    w.wide = calloc(n, n_wide);
    w.x_scale = calloc(n, sizeof(float));
    w.wide_scale = calloc(n, sizeof(float));
    w.whole = malloc(n * up(n_whole, 32) * sizeof(int32_t));
    return w;
}

static void done(work w) { free(w.x); free(w.wide); free(w.x_scale); free(w.wide_scale); free(w.whole); }

/* LayerNorm(x + what `by` makes of `wide`), in place of x, and as int8. n_wide: the length of rows of `wide`. */
static void add_and_norm(work *w, int64_t n_rows, const matrix *by, const norm *to, float *x) {
    const int64_t n = by->n_out, stride = up(n, 32);
    float y[n];
    times(w->wide, n_rows, by, 0, n, w->whole);
    for (int64_t row = 0; row < n_rows; row++) {
        float *own = x + row * n, mean = 0, square = 0;
        real(w->whole + row * stride, w->wide_scale[row], by, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] += own[i];
        for (int64_t i = 0; i < n; i++) mean += y[i];
        mean /= n;
        for (int64_t i = 0; i < n; i++) square += (y[i] - mean) * (y[i] - mean);
        float factor = 1.0f / sqrtf(square / n + to->eps);
        for (int64_t i = 0; i < n; i++) own[i] = (y[i] - mean) * factor * to->gain[i] + to->bias[i];
        quantise(own, n, w->x + row * w->n_x, w->x_scale + row);
    }
}

static void think(work *w, int64_t n_rows, const layer *l, float *x) {
    const int64_t n = l->one.n_out, n_hidden = up(n, 64);
    float y[n];
    times(w->x, n_rows, &l->one, 0, n, w->whole);
    for (int64_t row = 0; row < n_rows; row++) {
        real(w->whole + row * up(n, 32), w->x_scale[row], &l->one, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] = y[i] > 0 ? y[i] : 0;
        quantise(y, n, w->wide + row * n_hidden, w->wide_scale + row);
    }
    add_and_norm(w, n_rows, &l->two, &l->thinking, x);
}

/* Encoder: all rows of a sentence look at each other. x: sentences x room x d_model. */

static void attend_to_each_other(const model *m, work *w, const matrix *by, const int64_t *n_source,
                                 int64_t n_sentences, int64_t room) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_all = by->n_out;
    float score[room], head[n_heads * d_v], *all = malloc(room * n_all * sizeof(float));
    times(w->x, n_sentences * room, by, 0, n_all, w->whole);
    for (int64_t first = 0; first < n_sentences * room; first += room) {
        int64_t n = n_source[first / room];
        for (int64_t i = 0; i < n; i++)
            real(w->whole + (first + i) * up(n_all, 32), w->x_scale[first + i], by, 0, n_all, all + i * n_all);
        for (int64_t i = 0; i < room; i++) {
            memset(head, 0, sizeof head);
            for (int64_t h = 0; i < n && h < n_heads; h++) {
                const float *key = all + n_heads * d_k + h * width;
                for (int64_t s = 0; s < n; s++) score[s] = dot(all + i * n_all + h * d_k, key + s * n_all, d_k);
                softmax(score, n);
                mix(score, n, key + d_k, n_all, NULL, d_v, head + h * d_v);
            }
            quantise(head, n_heads * d_v, w->wide + (first + i) * up(n_heads * d_v, 64), w->wide_scale + first + i);
        }
    }
    free(all);
}

/* keys: layers x sentences x heads x d_k x lanes; values: layers x sentences x heads x lanes x d_v. */
static void remember(const model *m, work *w, float *keys, float *values, const int64_t *n_source, int64_t all,
                     int64_t begin, int64_t n_sentences, int64_t room, int64_t lanes) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads;
    float y[n_heads * (d_k + d_v)];
    for (int64_t l = 0; l < m->n_decoder; l++) {
        const matrix *by = &m->decoder[l].memory_KV;
        times(w->x, n_sentences * room, by, 0, by->n_out, w->whole);
        for (int64_t row = 0; row < n_sentences * room; row++) {
            int64_t sentence = begin + row / room, s = row % room;
            if (s >= n_source[sentence]) continue;
            real(w->whole + row * up(by->n_out, 32), w->x_scale[row], by, 0, by->n_out, y);
            for (int64_t h = 0; h < n_heads; h++) {
                int64_t place = (l * all + sentence) * n_heads + h;
                const float *own = y + h * (d_k + d_v);
                for (int64_t d = 0; d < d_k; d++) keys[(place * d_k + d) * lanes + s] = own[d];
                memcpy(values + (place * lanes + s) * d_v, own + d_k, d_v * sizeof(float));
            }
        }
    }
}

void encode(const model *m, float *x, const int64_t *n_source, float *keys, float *values, int64_t n_sentences,
            int64_t room, int64_t lanes) {
    int64_t at_once = MANY_ROWS / room > 1 ? MANY_ROWS / room : 1;
    work w = work_for(m, at_once * room);
    for (int64_t begin = 0; begin < n_sentences; begin += at_once) {
        int64_t n = n_sentences - begin < at_once ? n_sentences - begin : at_once;
        float *own = x + begin * room * m->d_model;
        for (int64_t row = 0; row < n * room; row++)
            quantise(own + row * m->d_model, m->d_model, w.x + row * w.n_x, w.x_scale + row);
        for (int64_t l = 0; l < m->n_encoder; l++) {
            attend_to_each_other(m, &w, &m->encoder[l].Q_KV, n_source + begin, n, room);
            add_and_norm(&w, n * room, &m->encoder[l].O, &m->encoder[l].attending, own);
            think(&w, n * room, m->encoder + l, own);
        }
        remember(m, &w, keys, values, n_source, n_sentences, begin, n, room, lanes);
    }
    done(w);
}

/* Decoder */

typedef struct {
    float *cells;          /* layers x sentences x heads x cells x (key, value) */
    const int64_t *cell;   /* sentences x hypotheses: where the key and the value of this step go */
    const float *hidden;   /* sentences x hypotheses x cells: 0 where a cell is of the hypothesis's past */
    const float *keys, *values;
    const int64_t *n_source;
    int64_t n_sentences, n_kept, n_cells, end, lanes;
} state;

static void attend_to_past(const model *m, work *w, const state *s, int64_t l, int64_t begin, int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_cells = s->n_cells;
    const matrix *by = &m->decoder[l].Q_KV;
    const int64_t n_all = by->n_out;
    float x[n_all], score[s->end], head[n_heads * d_v];
    int64_t seen[s->end];
    times(w->x, n_rows, by, 0, n_all, w->whole);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t row = begin * s->n_kept + i, n = 0;
        real(w->whole + i * up(n_all, 32), w->x_scale[i], by, 0, n_all, x);
        float *own = s->cells + (l * s->n_sentences + row / s->n_kept) * n_heads * n_cells * width;
        for (int64_t h = 0; h < n_heads; h++)
            memcpy(own + (h * n_cells + s->cell[row]) * width, x + n_heads * d_k + h * width, width * sizeof(float));
        for (int64_t c = 0; c < s->end; c++) {
            seen[n] = c;
            n += s->hidden[row * n_cells + c] == 0;
        }
        for (int64_t h = 0; h < n_heads; h++) {
            const float *past = own + h * n_cells * width;
            for (int64_t j = 0; j < n; j++) score[j] = dot(x + h * d_k, past + seen[j] * width, d_k);
            softmax(score, n);
            mix(score, n, past + d_k, width, seen, d_v, head + h * d_v);
        }
        quantise(head, n_heads * d_v, w->wide + i * up(n_heads * d_v, 64), w->wide_scale + i);
    }
}

static void attend_to_memory(const model *m, work *w, const state *s, int64_t l, int64_t begin, int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads, lanes = s->lanes;
    const matrix *by = &m->decoder[l].memory_Q;
    float x[by->n_out], score[lanes], head[n_heads * d_v];
    times(w->x, n_rows, by, 0, by->n_out, w->whole);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t sentence = begin + i / s->n_kept, n = s->n_source[sentence];
        real(w->whole + i * up(by->n_out, 32), w->x_scale[i], by, 0, by->n_out, x);
        for (int64_t h = 0; h < n_heads; h++) {
            int64_t place = (l * s->n_sentences + sentence) * n_heads + h;
            const float *key = s->keys + place * d_k * lanes, *value = s->values + place * lanes * d_v;
            mix(x + h * d_k, d_k, key, lanes, NULL, n, score);
            softmax(score, n);
            mix(score, n, value, d_v, NULL, d_v, head + h * d_v);
        }
        quantise(head, n_heads * d_v, w->wide + i * up(n_heads * d_v, 64), w->wide_scale + i);
    }
}

/* Of all logits, which are written nowhere, the highest of each group and the logarithm of the sum of exp. */
static void find_peaks(const matrix *by, const int8_t *x, const float *x_scale, int64_t n_rows, int32_t *whole,
                       float *peak, float *log_sum) {
    int64_t n_groups = up(by->n_out, GROUP) / GROUP;
    float logit[BLOCK], top[n_rows], sum[n_rows];
    for (int64_t row = 0; row < n_rows; row++) { top[row] = LOWEST; sum[row] = 0; }
    for (int64_t first = 0; first < by->n_out; first += BLOCK) {
        int64_t n = by->n_out - first < BLOCK ? by->n_out - first : BLOCK, n_own = up(n, GROUP) / GROUP;
        times(x, n_rows, by, first, n, whole);
        for (int64_t row = 0; row < n_rows; row++) {
            float *own = peak + row * n_groups + first / GROUP;
            real(whole + row * up(n, 32), x_scale[row], by, first, n, logit);
            for (int64_t i = n; i < n_own * GROUP; i++) logit[i] = LOWEST;
            for (int64_t g = 0; g < n_own; g++) own[g] = most(logit + g * GROUP, GROUP);
            float highest = most(own, n_own), more = 0;
            highest = highest > top[row] ? highest : top[row];
            for (int64_t i = 0; i < n; i++) more += exp_of(logit[i] - highest);
            sum[row] = sum[row] * exp_of(top[row] - highest) + more;
            top[row] = highest;
        }
    }
    for (int64_t row = 0; row < n_rows; row++) log_sum[row] = top[row] + logf(sum[row]);
}

/* x: rows x d_model, what goes in. out: rows, up to a multiple of 32, x up(d_model, 64), from which logits come. */
void step(const model *m, const state *s, float *x, int8_t *out, float *out_scale, float *peak, float *log_sum) {
    int64_t at_once = MANY_ROWS / s->n_kept > 1 ? MANY_ROWS / s->n_kept : 1, n_all = s->n_sentences * s->n_kept;
    work w = work_for(m, at_once * s->n_kept > n_all ? n_all : at_once * s->n_kept);
    for (int64_t begin = 0; begin < s->n_sentences; begin += at_once) {
        int64_t left = s->n_sentences - begin, n = (left < at_once ? left : at_once) * s->n_kept;
        float *own = x + begin * s->n_kept * m->d_model;
        for (int64_t row = 0; row < n; row++)
            quantise(own + row * m->d_model, m->d_model, w.x + row * w.n_x, w.x_scale + row);
        for (int64_t l = 0; l < m->n_decoder; l++) {
            const layer *at = m->decoder + l;
            attend_to_past(m, &w, s, l, begin, n);
            add_and_norm(&w, n, &at->O, &at->attending, own);
            attend_to_memory(m, &w, s, l, begin, n);
            add_and_norm(&w, n, &at->memory_O, &at->asking, own);
            think(&w, n, at, own);
        }
        memcpy(out + begin * s->n_kept * w.n_x, w.x, n * w.n_x);
        memcpy(out_scale + begin * s->n_kept, w.x_scale, n * sizeof(float));
    }
    done(w);
    int32_t *whole = malloc(up(n_all, 32) * BLOCK * sizeof(int32_t));
    find_peaks(&m->output, out, out_scale, n_all, whole, peak, log_sum);
    free(whole);
}

/* The logits of some groups again: 32 columns of one row each. */
void look(const model *m, const int8_t *x, const float *x_scale, const int64_t *row, const int64_t *group,
          int64_t n_looks, float *out) {
    const matrix *by = &m->output;
    const int64_t n_k = up(by->n_in, 64);
    for (int64_t i = 0; i < n_looks; i++) {
        int64_t first = group[i] * GROUP, n_own = by->n_out - first < GROUP ? by->n_out - first : GROUP;
        int32_t whole[GROUP];
        uint8_t own[n_k];
        without_sign(x + row[i] * n_k, n_k, own);
        times_one(own, n_k, by->packed + first * n_k, by->sum + first, whole);
        real(whole, x_scale[row[i]], by, first, n_own, out + i * GROUP);
        for (int64_t c = n_own; c < GROUP; c++) out[i * GROUP + c] = LOWEST;
    }
}

typedef struct {
    const float *so_far;     /* of each row; very low where it does not go on */
    const int64_t *state;    /* of each row, in the automaton of what may follow */
    const float *penalty;    /* states x tokens: 0 where a token may follow */
    const uint8_t *may_end;  /* of each sentence, or none: all may */
    int64_t eos_id;
} asked;

typedef struct { float value; int64_t parent, token; } candidate;

/* Among the best so far, the best first. Who comes later loses to an equal. */
static inline int64_t take_in(candidate *best, int64_t n, int64_t n_most, candidate new) {
    if (n == n_most && new.value <= best[n - 1].value) return n;
    int64_t i = n < n_most ? n : n - 1;
    for (; i > 0 && best[i - 1].value < new.value; i--) best[i] = best[i - 1];
    best[i] = new;
    return n < n_most ? n + 1 : n;
}

/* The best continuations of one sentence, looking only into groups that may hold one as good as `bound`. */
static int64_t look_for(const model *m, const int8_t *x, const float *x_scale, const float *peak, const float *log_sum,
                        const asked *a, int64_t sentence, int64_t n_kept, float bound, candidate *best) {
    const int64_t n_vocabulary = m->output.n_out, n_groups = up(n_vocabulary, GROUP) / GROUP;
    int64_t n = 0;
    for (int64_t k = 0; k < n_kept; k++) {
        int64_t row = sentence * n_kept + k;
        if (a->so_far[row] < LOWEST / 3) continue;
        const float *penalty = a->penalty + a->state[row] * n_vocabulary;
        for (int64_t g = 0; g < n_groups; g++) {
            float highest = peak[row * n_groups + g] - log_sum[row] + a->so_far[row], logit[GROUP];
            if (highest < bound || (n > n_kept && highest <= best[n - 1].value)) continue;
            look(m, x, x_scale, &row, &g, 1, logit);
            for (int64_t i = 0; i < GROUP && g * GROUP + i < n_vocabulary; i++) {
                int64_t token = g * GROUP + i;
                int is_forbidden = penalty[token] < 0 || (a->may_end && !a->may_end[sentence] && token == a->eos_id);
                if (!is_forbidden)
                    n = take_in(best, n, n_kept + 1, (candidate){logit[i] - log_sum[row] + a->so_far[row], k, token});
            }
        }
    }
    return n;
}

/* Of each sentence the n_kept + 1 best continuations, the best first; very low values where there are fewer. */
void choose(const model *m, const int8_t *x, const float *x_scale, const float *peak, const float *log_sum,
            const asked *a, int64_t n_sentences, int64_t n_kept, float *value, int64_t *parent, int64_t *token) {
    const int64_t n_groups = up(m->output.n_out, GROUP) / GROUP, n_most = n_kept + 1;
    candidate best[n_most];
    for (int64_t b = 0; b < n_sentences; b++) {
        /* The peaks: where all of them may be said, none that is wanted is lower than the last of as many. */
        int64_t n = 0;
        for (int64_t row = b * n_kept; row < (b + 1) * n_kept; row++)
            for (int64_t g = 0; g < n_groups && a->so_far[row] >= LOWEST / 3; g++) {
                float highest = peak[row * n_groups + g] - log_sum[row] + a->so_far[row];
                if (n < n_most || highest > best[n - 1].value)
                    n = take_in(best, n, n_most, (candidate){highest, 0, 0});
            }
        float bound = n == n_most ? best[n - 1].value : LOWEST;
        bound -= 1e-4f * fabsf(bound); /* what is found again may be rounded to a little less than its peak */
        n = look_for(m, x, x_scale, peak, log_sum, a, b, n_kept, bound, best);
        /* Some may not be said, and what was not looked into may hold better ones than those that stand for them. */
        if (n < n_most || best[n - 1].value < bound) {
            bound = n < n_most ? LOWEST : best[n - 1].value - 1e-4f * fabsf(best[n - 1].value);
            n = look_for(m, x, x_scale, peak, log_sum, a, b, n_kept, bound, best);
        }
        for (int64_t i = 0; i < n_most; i++) {
            value[b * n_most + i] = i < n ? best[i].value : LOWEST;
            parent[b * n_most + i] = i < n ? best[i].parent : 0;
            token[b * n_most + i] = i < n ? best[i].token : 0;
        }
    }
}

/* For each hypothesis the first cell that none of its sentence has in its past, which it alone sees from now on.
   Where the last of all that are seen ends; -1, and nothing changed, where there are too few. */
int64_t take_cells(float *hidden, int64_t n_sentences, int64_t n_kept, int64_t n_cells, int64_t *cell) {
    int64_t end = 0;
    for (int64_t b = 0; b < n_sentences; b++) {
        const float *own = hidden + b * n_kept * n_cells;
        int64_t n = 0;
        for (int64_t c = 0; c < n_cells; c++) {
            int is_seen = 0;
            for (int64_t k = 0; k < n_kept; k++) is_seen |= own[k * n_cells + c] == 0;
            if (!is_seen && n < n_kept) cell[b * n_kept + n++] = c, is_seen = 1;
            if (is_seen && c >= end) end = c + 1;
        }
        if (n < n_kept) return -1;
    }
    for (int64_t row = 0; row < n_sentences * n_kept; row++) hidden[row * n_cells + cell[row]] = 0;
    return end;
}
