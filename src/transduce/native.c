/* A Transformer, encoder and decoder step, without a word to Python in between. Compiled by native.py, twice: in float32
   where FLOAT32 is defined, else in int8.

   In int8, rows are whole numbers, each row with a scale of its own, and so are columns of weights; products are whole
   numbers, which times both scales, plus a bias, are what float32 would have been. In float32 a row's products are added
   up in the same order whatever stands beside it. Sentences go through all layers some at a time, so that what passes
   from one product to the next stays in the cache of a core. All is the work of one thread. */

#include <math.h>

#include "native_products.h"

#define GROUP 32       /* tokens of a group, as in peaks.py */
#define BLOCK 512      /* columns of logits that are found together */
#define MANY_ROWS 128  /* that go through the layers together */
#define LOWEST -3e38f  /* for -inf, which the compiler is told not to expect */

/* For a test. */
void multiply(const entry *x, int64_t n_rows, const matrix *m, total *out) { times(x, n_rows, m, 0, m->n_out, out); }

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

/* Totals as what they stand for, with the bias; and back to what is multiplied, with the scale of the row. */
#ifdef FLOAT32
static inline void real(const float *restrict whole, float row_scale, const matrix *m, int64_t first, int64_t n,
                        float *restrict out) {
    (void)row_scale;
    for (int64_t i = 0; i < n; i++) out[i] = whole[i];
    if (m->bias)
        for (int64_t i = 0; i < n; i++) out[i] += m->bias[first + i];
}

static inline void quantise(const float *restrict x, int64_t n, float *restrict out, float *scale) {
    memcpy(out, x, n * sizeof(float));
    memset(out + n, 0, (up(n, 64) - n) * sizeof(float));
    *scale = 1;
}
#else
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
#endif

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
    entry *x, *wide; /* rows of d_model, and of whatever stands between two products of a sub-layer */
    float *x_scale, *wide_scale;
    total *whole;
    int64_t n_x, n_wide; /* length of a row */
} work;

static work work_for(const model *m, int64_t n_rows) {
    int64_t n = up(n_rows, 32), n_head = m->n_heads * m->d_v, n_qkv = m->n_heads * (2 * m->d_k + m->d_v);
    int64_t n_wide = up(m->d_ff > n_head ? m->d_ff : n_head, 64), n_whole = n_qkv > n_wide ? n_qkv : n_wide;
    n_whole = n_whole > m->d_model ? n_whole : m->d_model;
    n_whole = n_whole > BLOCK ? n_whole : BLOCK;
    work w = {.n_x = up(m->d_model, 64), .n_wide = n_wide};
    w.x = calloc(n, w.n_x * sizeof(entry));
    w.wide = calloc(n, n_wide * sizeof(entry));
    w.x_scale = calloc(n, sizeof(float));
    w.wide_scale = calloc(n, sizeof(float));
    w.whole = malloc(n * up(n_whole, 32) * sizeof(total));
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

/* Encoder: all rows of a sentence look at each other. Sentences lie one behind another, without what fills them up. */

static void attend_to_each_other(const model *m, work *w, const matrix *by, const int64_t *n_source,
                                 int64_t n_sentences, int64_t n_rows, int64_t room) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_all = by->n_out;
    float score[room], head[n_heads * d_v], *all = malloc(room * n_all * sizeof(float));
    times(w->x, n_rows, by, 0, n_all, w->whole);
    for (int64_t sentence = 0, first = 0; sentence < n_sentences; first += n_source[sentence++]) {
        int64_t n = n_source[sentence];
        for (int64_t i = 0; i < n; i++)
            real(w->whole + (first + i) * up(n_all, 32), w->x_scale[first + i], by, 0, n_all, all + i * n_all);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t h = 0; h < n_heads; h++) {
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
                     int64_t begin, int64_t n_sentences, int64_t n_rows, int64_t lanes) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads;
    float y[n_heads * (d_k + d_v)];
    for (int64_t l = 0; l < m->n_decoder; l++) {
        const matrix *by = &m->decoder[l].memory_KV;
        int64_t row = 0;
        times(w->x, n_rows, by, 0, by->n_out, w->whole);
        for (int64_t sentence = begin; sentence < begin + n_sentences; sentence++)
            for (int64_t s = 0; s < n_source[sentence]; s++, row++) {
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

/* x: sentences x room x d_model. */
void encode(const model *m, const float *x, const int64_t *n_source, float *keys, float *values, int64_t n_sentences,
            int64_t room, int64_t lanes) {
    const int64_t n_most = room > MANY_ROWS ? room : MANY_ROWS, n_x = m->d_model;
    work w = work_for(m, n_most);
    float *own = malloc(n_most * n_x * sizeof(float));
    for (int64_t begin = 0, n; begin < n_sentences; begin += n) {
        int64_t n_rows = 0;
        for (n = 0; begin + n < n_sentences && n_rows + n_source[begin + n] <= n_most; n_rows += n_source[begin + n++])
            memcpy(own + n_rows * n_x, x + (begin + n) * room * n_x, n_source[begin + n] * n_x * sizeof(float));
        for (int64_t row = 0; row < n_rows; row++)
            quantise(own + row * n_x, n_x, w.x + row * w.n_x, w.x_scale + row);
        for (int64_t l = 0; l < m->n_encoder; l++) {
            attend_to_each_other(m, &w, &m->encoder[l].Q_KV, n_source + begin, n, n_rows, room);
            add_and_norm(&w, n_rows, &m->encoder[l].O, &m->encoder[l].attending, own);
            think(&w, n_rows, m->encoder + l, own);
        }
        remember(m, &w, keys, values, n_source, n_sentences, begin, n, n_rows, lanes);
    }
    free(own);
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
static void find_peaks(const matrix *by, const entry *x, const float *x_scale, int64_t n_rows, total *whole,
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
void step(const model *m, const state *s, float *x, entry *out, float *out_scale, float *peak, float *log_sum) {
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
        memcpy(out + begin * s->n_kept * w.n_x, w.x, n * w.n_x * sizeof(entry));
        memcpy(out_scale + begin * s->n_kept, w.x_scale, n * sizeof(float));
    }
    done(w);
    total *whole = malloc(up(n_all, 32) * BLOCK * sizeof(total));
    find_peaks(&m->output, out, out_scale, n_all, whole, peak, log_sum);
    free(whole);
}

/* The logits of some groups again: 32 columns of one row each. */
void look(const model *m, const entry *x, const float *x_scale, const int64_t *row, const int64_t *group,
          int64_t n_looks, float *out) {
    const matrix *by = &m->output;
    for (int64_t i = 0; i < n_looks; i++) {
        int64_t first = group[i] * GROUP, n_own = by->n_out - first < GROUP ? by->n_out - first : GROUP;
        total whole[GROUP];
        times_group(x + row[i] * up(by->n_in, 64), by, first, whole);
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
static int64_t look_for(const model *m, const entry *x, const float *x_scale, const float *peak, const float *log_sum,
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
void choose(const model *m, const entry *x, const float *x_scale, const float *peak, const float *log_sum,
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
