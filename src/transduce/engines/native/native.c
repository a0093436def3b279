/* A Transformer, encoder and decoder step, without a word to Python in between. Compiled by native.py, twice: in float32
   where FLOAT32 is defined, else in int8.

   In int8, rows are whole numbers, each row with a scale of its own, and so are columns of weights; products are whole
   numbers, which times both scales, plus a bias, are what float32 would have been; keys and values are float16. In
   float32 a row's products are added up in the same order whatever stands beside it. Sentences go through all layers
   some at a time, so that what passes from one product to the next stays in the cache of a core. All is the work of one
   thread. */

#include <math.h>

#include "products.h"
#include "vectors.h"

#define GROUP 32       /* tokens of a group, as in peaks.py */
#define BLOCK 512      /* columns of logits that are found together */
#define MANY_ROWS 128  /* that go through the layers together */

/* For those who expect it: it is written and compared, never added. */
static const union { uint32_t bits; float is; } INFINITE = {0x7f800000u}, MINUS_INFINITE = {0xff800000u};

/* For a test. */
void multiply(const entry *x, int64_t n_rows, const matrix *m, total *out) { matmul(x, n_rows, m, 0, m->n_out, out); }

/* Rows */

static inline float max_of(const float *x, int64_t n) {
    float found = LOWEST;
    for (int64_t i = 0; i < n; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* Totals as what they stand for, with the bias; and back to what is multiplied, with the scale of the row. */
#ifdef FLOAT32
static inline void dequantise(const float *restrict whole, float row_scale, const matrix *m, int64_t first, int64_t n,
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
static inline void dequantise(const int32_t *restrict whole, float row_scale, const matrix *m, int64_t first, int64_t n,
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

/* As `real`, one vector of it; LOWEST past the last column. */
INLINE __m512 dequantise_vector(const total *whole, float row_scale, const matrix *m, int64_t first, __mmask16 is_in) {
#ifdef FLOAT32
    (void)row_scale;
    __m512 x = _mm512_loadu_ps(whole);
#else
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(whole)), _mm512_set1_ps(row_scale));
    x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(is_in, m->scale + first));
#endif
    if (m->bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(is_in, m->bias + first));
    return _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), is_in, x);
}

/* The model */

typedef struct { const float *gain, *bias; float eps; } norm;

typedef struct {
    matrix Q_KV; /* queries of all heads, divided by the root of d_k; then key and value of each head */
    matrix O;
    norm self_norm;
    matrix memory_Q, memory_KV, memory_O; /* the decoder's alone */
    norm memory_norm;
    matrix first, second;
    norm feed_forward_norm;
} layer;

typedef struct {
    const layer *encoder, *decoder;
    matrix output;
    const float *source_embedding, *target_embedding; /* tokens x d_model, as the model has them */
    float embedding_scale;                            /* sqrt(d_model) */
    int64_t n_encoder, n_decoder, n_heads, d_k, d_v, d_model, d_ff;
} model;

/* What some rows are on their way through the layers. */
typedef struct {
    entry *x, *wide; /* rows of d_model, and of whatever stands between two products of a sub-layer */
    float *x_scale, *wide_scale;
    total *whole;
    int64_t n_x; /* length of a row of x */
} work;

static work work_for(const model *m, int64_t n_rows) {
    int64_t n = up(n_rows, 32), n_head = m->n_heads * m->d_v, n_qkv = m->n_heads * (2 * m->d_k + m->d_v);
    int64_t n_wide = up(m->d_ff > n_head ? m->d_ff : n_head, 64), n_whole = n_qkv > n_wide ? n_qkv : n_wide;
    n_whole = n_whole > m->d_model ? n_whole : m->d_model;
    work w = {.n_x = up(m->d_model, 64)};
    w.x = calloc(n, w.n_x * sizeof(entry));
    w.wide = calloc(n, n_wide * sizeof(entry));
    w.x_scale = calloc(n, sizeof(float));
    w.wide_scale = calloc(n, sizeof(float));
    w.whole = malloc(n * up(n_whole, 32) * sizeof(total));
    return w;
}

static void done(work w) { free(w.x); free(w.wide); free(w.x_scale); free(w.wide_scale); free(w.whole); }

/* LayerNorm(x + what `by` makes of `wide`), in place of x, and as what is multiplied. */
static void add_and_norm(work *w, int64_t n_rows, const matrix *by, const norm *to, float *x) {
    const int64_t n = by->n_out, stride = up(n, 32);
    float y[n];
    matmul(w->wide, n_rows, by, 0, n, w->whole);
    for (int64_t row = 0; row < n_rows; row++) {
        float *own = x + row * n, mean = 0, square = 0;
        dequantise(w->whole + row * stride, w->wide_scale[row], by, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] += own[i];
        for (int64_t i = 0; i < n; i++) mean += y[i];
        mean /= n;
        for (int64_t i = 0; i < n; i++) square += (y[i] - mean) * (y[i] - mean);
        float factor = 1.0f / sqrtf(square / n + to->eps);
        for (int64_t i = 0; i < n; i++) own[i] = (y[i] - mean) * factor * to->gain[i] + to->bias[i];
        quantise(own, n, w->x + row * w->n_x, w->x_scale + row);
    }
}

static void feed_forward(work *w, int64_t n_rows, const layer *l, float *x) {
    const int64_t n = l->first.n_out, n_hidden = up(n, 64);
    float y[n];
    matmul(w->x, n_rows, &l->first, 0, n, w->whole);
    for (int64_t row = 0; row < n_rows; row++) {
        dequantise(w->whole + row * up(n, 32), w->x_scale[row], &l->first, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] = y[i] > 0 ? y[i] : 0;
        quantise(y, n, w->wide + row * n_hidden, w->wide_scale + row);
    }
    add_and_norm(w, n_rows, &l->second, &l->feed_forward_norm, x);
}

/* What is remembered of all sentences, as `Cells` has it. */
typedef struct {
    kept *cells;    /* layers x sentences x heads x cells x (key, value) */
    int64_t *cell;  /* sentences x hypotheses: where the key and the value of this step go */
    float *hidden;  /* sentences x hypotheses x cells: 0 where a cell is of the hypothesis's past */
    kept *keys;     /* layers x sentences x heads x d_k x lanes */
    kept *values;   /* layers x sentences x heads x lanes x d_v */
    float *unseen;  /* sentences x lanes: 0 where a source has a token */
    int64_t *n_source, *length;
    int64_t n_sentences, n_kept, n_cells, end, lanes;
} state;

/* Encoder: all rows of a sentence look at each other. Sentences lie one behind another, without what fills them up. */

static void attend_in_encoder(const model *m, work *w, const matrix *by, const int64_t *n_source,
                                 int64_t n_sentences, int64_t n_rows, int64_t room) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_all = by->n_out;
    const int64_t n_queries = n_heads * d_k;
    const int64_t n_scores = up(room, LANES), n_head = n_heads * d_v;
    float score[TOGETHER * n_scores], head[TOGETHER * n_head], y[n_all], *query = malloc(room * n_queries * sizeof(float));
    kept *all = malloc(room * n_heads * width * sizeof(kept));
    matmul(w->x, n_rows, by, 0, n_all, w->whole);
    for (int64_t sentence = 0, first = 0; sentence < n_sentences; first += n_source[sentence++]) {
        int64_t n = n_source[sentence];
        for (int64_t i = 0; i < n; i++) {
            dequantise(w->whole + (first + i) * up(n_all, 32), w->x_scale[first + i], by, 0, n_all, y);
            memcpy(query + i * n_queries, y, n_queries * sizeof(float));
            keep(y + n_queries, n_heads * width, all + i * n_heads * width);
        }
        for (int64_t i = 0, n_own; i < n; i += n_own) {
            n_own = n - i < TOGETHER ? n - i : TOGETHER;
            for (int64_t h = 0; h < n_heads; h++) {
                const kept *key = all + h * width;
                for (int64_t q = 0; q < n_own; q++) {
                    const float *own = query + (i + q) * n_queries + h * d_k;
                    dots(own, d_k, n, key, n_heads * width, NULL, 0, score + q * n_scores);
                    softmax(score + q * n_scores, n);
                }
                weighted_sums(n_own, score, n_scores, n, key + d_k, n_heads * width, 0, d_v, head + h * d_v, n_head);
            }
            for (int64_t row = first + i; row < first + i + n_own; row++)
                quantise(head + (row - first - i) * n_head, n_head, w->wide + row * up(n_head, 64), w->wide_scale + row);
        }
    }
    free(all), free(query);
}

/* Sentences that come. */
typedef struct {
    const int64_t *source; /* sentences x room, filled up with pad_id */
    const int64_t *places; /* among all sentences */
    const int64_t *number, *limit;
    int64_t n, room, pad_id, bos_id;
    const float *positions; /* positions x d_model */
} arrivals;

/* What decoders ask of these sentences, whose rows lie one behind another. */
static void project_memory(const model *m, work *w, const state *s, const int64_t *places, int64_t n_sentences,
                     int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads, lanes = s->lanes;
    float y[n_heads * (d_k + d_v)];
    kept output[n_heads * (d_k + d_v)];
    for (int64_t l = 0; l < m->n_decoder; l++) {
        const matrix *by = &m->decoder[l].memory_KV;
        int64_t row = 0;
        matmul(w->x, n_rows, by, 0, by->n_out, w->whole);
        for (int64_t i = 0; i < n_sentences; i++)
            for (int64_t at = 0; at < s->n_source[places[i]]; at++, row++) {
                dequantise(w->whole + row * up(by->n_out, 32), w->x_scale[row], by, 0, by->n_out, y);
                keep(y, by->n_out, output);
                for (int64_t h = 0; h < n_heads; h++) {
                    int64_t place = (l * s->n_sentences + places[i]) * n_heads + h;
                    const kept *own = output + h * (d_k + d_v);
                    for (int64_t d = 0; d < d_k; d++) s->keys[(place * d_k + d) * lanes + at] = own[d];
                    memcpy(s->values + (place * lanes + at) * d_v, own + d_k, d_v * sizeof(kept));
                }
            }
    }
}

/* The scaled embedding of a token plus its position. */
static inline void embed(const model *m, const float *embedding, int64_t id, const float *position, float *x) {
    const float *token = embedding + id * m->d_model;
    for (int64_t d = 0; d < m->d_model; d++) x[d] = token[d] * m->embedding_scale + position[d];
}

static int64_t embed_source(const model *m, const arrivals *a, int64_t sentence, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++)
        embed(m, m->source_embedding, a->source[sentence * a->room + i], a->positions + i * m->d_model,
              x + i * m->d_model);
    return n;
}

void encode(const model *m, const state *s, const arrivals *a) {
    const int64_t max_n = a->room > MANY_ROWS ? a->room : MANY_ROWS, n_x = m->d_model;
    int64_t n_source[a->n];
    for (int64_t i = 0; i < a->n; i++) {
        for (n_source[i] = 0; n_source[i] < a->room && a->source[i * a->room + n_source[i]] != a->pad_id;) n_source[i]++;
        s->n_source[a->places[i]] = n_source[i];
        float *unseen = s->unseen + a->places[i] * s->lanes;
        for (int64_t c = 0; c < s->lanes; c++) unseen[c] = c < n_source[i] ? 0 : MINUS_INFINITE.is;
    }
    work w = work_for(m, max_n);
    float *own = malloc(max_n * n_x * sizeof(float));
    for (int64_t begin = 0, n; begin < a->n; begin += n) {
        int64_t n_rows = 0;
        for (n = 0; begin + n < a->n && n_rows + n_source[begin + n] <= max_n; n++)
            n_rows += embed_source(m, a, begin + n, n_source[begin + n], own + n_rows * n_x);
        for (int64_t row = 0; row < n_rows; row++)
            quantise(own + row * n_x, n_x, w.x + row * w.n_x, w.x_scale + row);
        for (int64_t l = 0; l < m->n_encoder; l++) {
            attend_in_encoder(m, &w, &m->encoder[l].Q_KV, n_source + begin, n, n_rows, a->room);
            add_and_norm(&w, n_rows, &m->encoder[l].O, &m->encoder[l].self_norm, own);
            feed_forward(&w, n_rows, m->encoder + l, own);
        }
        project_memory(m, &w, s, a->places + begin, n, n_rows);
    }
    free(own);
    done(w);
}

/* Decoder */

/* rows: of which hypotheses, among all, these rows are. */
static void attend_to_past(const model *m, work *w, const state *s, int64_t l, const int64_t *rows, int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_cells = s->n_cells;
    const matrix *by = &m->decoder[l].Q_KV;
    const int64_t n_all = by->n_out;
    float x[n_all], score[up(s->end, LANES)], head[n_heads * d_v];
    int64_t seen[s->end];
    matmul(w->x, n_rows, by, 0, n_all, w->whole);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t row = rows[i], n = 0;
        dequantise(w->whole + i * up(n_all, 32), w->x_scale[i], by, 0, n_all, x);
        kept *own = s->cells + (l * s->n_sentences + row / s->n_kept) * n_heads * n_cells * width;
        for (int64_t h = 0; h < n_heads; h++)
            keep(x + n_heads * d_k + h * width, width, own + (h * n_cells + s->cell[row]) * width);
        for (int64_t c = 0; c < s->end; c++) {
            seen[n] = c;
            n += s->hidden[row * n_cells + c] == 0;
        }
        for (int64_t h = 0; h < n_heads; h++) {
            const kept *past = own + h * n_cells * width;
            dots(x + h * d_k, d_k, n, past, width, seen, n_cells * width, score);
            softmax(score, n);
            weighted_sums_of(1, score, 0, n, past + d_k, width, seen, n_cells * width, d_v, head + h * d_v, 0);
        }
        quantise(head, n_heads * d_v, w->wide + i * up(n_heads * d_v, 64), w->wide_scale + i);
    }
}

static void attend_to_memory(const model *m, work *w, const state *s, int64_t l, const int64_t *rows, int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads, lanes = s->lanes;
    const matrix *by = &m->decoder[l].memory_Q;
    const int64_t n_x = by->n_out, n_head = n_heads * d_v;
    float x[TOGETHER * n_x], score[TOGETHER * lanes], head[TOGETHER * n_head];
    matmul(w->x, n_rows, by, 0, n_x, w->whole);
    for (int64_t i = 0, n_own; i < n_rows; i += n_own) { /* hypotheses of one sentence */
        const int64_t sentence = rows[i] / s->n_kept, n = s->n_source[sentence];
        for (n_own = 0; n_own < TOGETHER && i + n_own < n_rows && rows[i + n_own] / s->n_kept == sentence; n_own++)
            dequantise(w->whole + (i + n_own) * up(n_x, 32), w->x_scale[i + n_own], by, 0, n_x, x + n_own * n_x);
        for (int64_t h = 0; h < n_heads; h++) {
            int64_t place = (l * s->n_sentences + sentence) * n_heads + h;
            const kept *key = s->keys + place * d_k * lanes, *value = s->values + place * lanes * d_v;
            weighted_sums(n_own, x + h * d_k, n_x, d_k, key, lanes, d_k * lanes, n, score, lanes);
            for (int64_t q = 0; q < n_own; q++) softmax(score + q * lanes, n);
            weighted_sums(n_own, score, lanes, n, value, d_v, lanes * d_v, d_v, head + h * d_v, n_head);
        }
        for (int64_t q = 0; q < n_own; q++)
            quantise(head + q * n_head, n_head, w->wide + (i + q) * up(n_head, 64), w->wide_scale + i + q);
    }
}

/* Of all logits, which are written nowhere, the highest of each group and the logarithm of the sum of exp. */
static void find_peaks(const matrix *by, const entry *x, const float *x_scale, int64_t n_rows, total *whole,
                       float *peak, float *log_sum) {
    const int64_t n_groups = up(by->n_out, GROUP) / GROUP;
    float *top = malloc(n_rows * sizeof(float)), *sums = calloc(n_rows * LANES, sizeof(float));
    for (int64_t row = 0; row < n_rows; row++) top[row] = LOWEST;
    for (int64_t first = 0; first < by->n_out; first += BLOCK) {
        const int64_t n = by->n_out - first < BLOCK ? by->n_out - first : BLOCK, stride = up(n, 32);
        matmul(x, n_rows, by, first, n, whole);
        for (int64_t row = 0; row < n_rows; row++) {
            __m512 sum = _mm512_loadu_ps(sums + row * LANES);
            for (int64_t at = 0; at < n; at += 4 * GROUP) {
                __m512 logit[8], group[4];
                for (int i = 0; i < 8; i++) {
                    const int64_t column = at + i * LANES;
                    logit[i] = dequantise_vector(whole + row * stride + column, x_scale[row], by, first + column, REST(n - column));
                }
                for (int i = 0; i < 4; i++) group[i] = _mm512_max_ps(logit[2 * i], logit[2 * i + 1]);
                const __m128 highest = fold(0, group);
                const int64_t at_group = (first + at) / GROUP;
                _mm_mask_storeu_ps(peak + row * n_groups + at_group, REST(n_groups - at_group), highest);
                const float of_all = _mm512_reduce_max_ps(_mm512_broadcast_f32x4(highest));
                if (of_all > top[row]) { /* seldom, but for the first */
                    sum = _mm512_mul_ps(sum, exp_of(_mm512_set1_ps(top[row] - of_all)));
                    top[row] = of_all;
                }
                const __m512 from = _mm512_set1_ps(top[row]);
                for (int i = 0; i < 8; i++) sum = _mm512_add_ps(sum, exp_of(_mm512_sub_ps(logit[i], from)));
            }
            _mm512_storeu_ps(sums + row * LANES, sum);
        }
    }
    for (int64_t row = 0; row < n_rows; row++)
        log_sum[row] = top[row] + logf(_mm512_reduce_add_ps(_mm512_loadu_ps(sums + row * LANES)));
    free(top), free(sums);
}

/* What came of a step: rows, up to a multiple of 32, x up(d_model, 64), from which logits come, and their peaks. */
typedef struct {
    entry *x;
    float *scale, *peak, *log_sum;
} step_output;

/* x: rows x d_model, what goes in. */
static void step_of(const model *m, const state *s, const int64_t *rows, int64_t n_rows, float *x, step_output out) {
    work w = work_for(m, n_rows < MANY_ROWS ? n_rows : MANY_ROWS);
    for (int64_t begin = 0, n; begin < n_rows; begin += n) {
        n = n_rows - begin < MANY_ROWS ? n_rows - begin : MANY_ROWS;
        float *own = x + begin * m->d_model;
        for (int64_t row = 0; row < n; row++)
            quantise(own + row * m->d_model, m->d_model, w.x + row * w.n_x, w.x_scale + row);
        for (int64_t l = 0; l < m->n_decoder; l++) {
            const layer *at = m->decoder + l;
            attend_to_past(m, &w, s, l, rows + begin, n);
            add_and_norm(&w, n, &at->O, &at->self_norm, own);
            attend_to_memory(m, &w, s, l, rows + begin, n);
            add_and_norm(&w, n, &at->memory_O, &at->memory_norm, own);
            feed_forward(&w, n, at, own);
        }
        memcpy(out.x + begin * w.n_x, w.x, n * w.n_x * sizeof(entry));
        memcpy(out.scale + begin, w.x_scale, n * sizeof(float));
    }
    done(w);
    total *whole = malloc(up(n_rows, 32) * BLOCK * sizeof(total));
    find_peaks(&m->output, out.x, out.scale, n_rows, whole, out.peak, out.log_sum);
    free(whole);
}

/* Of all hypotheses. */
void step(const model *m, const state *s, float *x, entry *out, float *out_scale, float *peak, float *log_sum) {
    const int64_t n = s->n_sentences * s->n_kept;
    int64_t *rows = malloc(n * sizeof(int64_t));
    for (int64_t row = 0; row < n; row++) rows[row] = row;
    step_of(m, s, rows, n, x, (step_output){out, out_scale, peak, log_sum});
    free(rows);
}

#include "search.h"
