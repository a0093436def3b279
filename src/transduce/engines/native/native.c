/* The Transformer's encoder and one step of its decoder, without calls to Python in between. library.py compiles this
   file twice: in float32 with FLOAT32 defined, and in int8 without it.

   In int8, each row has a scale, and so has each column of a weight matrix. A product is computed in integers and
   multiplied by both scales; then the bias is added. Keys and values are float16. In float32, the sums of a row are
   accumulated in the same order for any number of other rows. Rows pass through all layers in blocks, so that
   intermediate results stay in the caches of a core. Everything runs in the calling thread. */

#include <math.h>

#include "products.h"
#include "vectors.h"

#define GROUP 32          /* tokens per group, as in peaks.py */
#define BLOCK 512         /* columns of logits that are computed together */
#define ROWS_PER_PASS 128 /* rows that pass through all layers together */

/* Infinity sentinels: stored and compared, never used in arithmetic, which -ffinite-math-only would miscompile. */
static const union { uint32_t bits; float value; } INFINITE = {0x7f800000u}, MINUS_INFINITE = {0xff800000u};

/* For tests: all columns of a product. */
void multiply(const element_t *x, int64_t n_rows, const matrix_t *m, sum_t *out) {
    matmul(x, n_rows, m, 0, m->n_out, out);
}

/* Rows */

static inline float max_of(const float *x, int64_t n) {
    float highest = LOWEST;
    for (int64_t i = 0; i < n; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

/* `dequantise` converts sums to float32 and adds the bias, for n columns from `first`. `quantise` converts a row to the
   elements that are multiplied, padded with zeros to a multiple of 64, and returns the scale of the row. */
#ifdef FLOAT32
static inline void dequantise(const float *restrict sums, float row_scale, const matrix_t *m, int64_t first, int64_t n,
                              float *restrict out) {
    (void)row_scale;
    for (int64_t i = 0; i < n; i++) out[i] = sums[i];
    if (m->bias)
        for (int64_t i = 0; i < n; i++) out[i] += m->bias[first + i];
}

static inline void quantise(const float *restrict x, int64_t n, float *restrict out, float *scale) {
    memcpy(out, x, n * sizeof(float));
    memset(out + n, 0, (round_up(n, 64) - n) * sizeof(float));
    *scale = 1;
}
#else
static inline void dequantise(const int32_t *restrict sums, float row_scale, const matrix_t *m, int64_t first,
                              int64_t n, float *restrict out) {
    const float *restrict scale = m->scale + first;
    for (int64_t i = 0; i < n; i++) out[i] = (float)sums[i] * row_scale * scale[i];
    if (m->bias)
        for (int64_t i = 0; i < n; i++) out[i] += m->bias[first + i];
}

static inline void quantise(const float *restrict x, int64_t n, int8_t *restrict out, float *scale) {
    float highest = 1e-12f * 127;
    for (int64_t i = 0; i < n; i++) highest = fabsf(x[i]) > highest ? fabsf(x[i]) : highest;
    float factor = 127.0f / highest;
    for (int64_t i = 0; i < n; i++) out[i] = (int8_t)rintf(x[i] * factor);
    memset(out + n, 0, round_up(n, 64) - n);
    *scale = highest / 127.0f;
}
#endif

/* `dequantise` for one vector of columns. Lanes that are not in `mask` become LOWEST. */
INLINE __m512 dequantise_vector(const sum_t *sums, float row_scale, const matrix_t *m, int64_t first, __mmask16 mask) {
#ifdef FLOAT32
    (void)row_scale;
    __m512 x = _mm512_loadu_ps(sums);
#else
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sums)), _mm512_set1_ps(row_scale));
    x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, m->scale + first));
#endif
    if (m->bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, m->bias + first));
    return _mm512_mask_mov_ps(_mm512_set1_ps(LOWEST), mask, x);
}

/* The model */

typedef struct { const float *gain, *bias; float eps; } norm_t;

typedef struct {
    matrix_t Q_KV; /* queries of all heads, already divided by sqrt(d_k); then key and value of each head */
    matrix_t O;
    norm_t self_norm;
    matrix_t memory_Q, memory_KV, memory_O; /* decoder only */
    norm_t memory_norm;                     /* decoder only */
    matrix_t first, second;
    norm_t feed_forward_norm;
} layer_t;

typedef struct {
    const layer_t *encoder, *decoder;
    matrix_t output;
    const float *source_embedding, *target_embedding; /* tokens x d_model, not scaled; the model's own tensors */
    float embedding_scale;                            /* sqrt(d_model) */
    int64_t n_encoder, n_decoder, n_heads, d_k, d_v, d_model, d_ff;
} model_t;

/* Working memory for the rows that pass through the layers together. */
typedef struct {
    element_t *x;     /* rows of d_model elements: the quantised input of a sub-layer */
    element_t *inner; /* quantised rows between the two products of a sub-layer */
    float *x_scale, *inner_scale;
    sum_t *sums;
    int64_t n_x; /* length of a row of `x`, with padding */
} buffers_t;

static buffers_t allocate_buffers(const model_t *m, int64_t n_rows) {
    int64_t n = round_up(n_rows, 32), n_head = m->n_heads * m->d_v, n_qkv = m->n_heads * (2 * m->d_k + m->d_v);
    int64_t n_inner = round_up(m->d_ff > n_head ? m->d_ff : n_head, 64), n_sums = n_qkv > n_inner ? n_qkv : n_inner;
    n_sums = n_sums > m->d_model ? n_sums : m->d_model;
    buffers_t b = {.n_x = round_up(m->d_model, 64)};
    b.x = calloc(n, b.n_x * sizeof(element_t));
    b.inner = calloc(n, n_inner * sizeof(element_t));
    b.x_scale = calloc(n, sizeof(float));
    b.inner_scale = calloc(n, sizeof(float));
    b.sums = malloc(n * round_up(n_sums, 32) * sizeof(sum_t));
    return b;
}

static void free_buffers(buffers_t b) { free(b.x); free(b.inner); free(b.x_scale); free(b.inner_scale); free(b.sums); }

/* LayerNorm(x + inner W), in place of x, and quantised to b->x. */
static void add_and_norm(buffers_t *b, int64_t n_rows, const matrix_t *W, const norm_t *norm, float *x) {
    const int64_t n = W->n_out, stride = round_up(n, 32);
    float y[n];
    matmul(b->inner, n_rows, W, 0, n, b->sums);
    for (int64_t r = 0; r < n_rows; r++) {
        float *row = x + r * n, mean = 0, square = 0;
        dequantise(b->sums + r * stride, b->inner_scale[r], W, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] += row[i];
        for (int64_t i = 0; i < n; i++) mean += y[i];
        mean /= n;
        for (int64_t i = 0; i < n; i++) square += (y[i] - mean) * (y[i] - mean);
        float factor = 1.0f / sqrtf(square / n + norm->eps);
        for (int64_t i = 0; i < n; i++) row[i] = (y[i] - mean) * factor * norm->gain[i] + norm->bias[i];
        quantise(row, n, b->x + r * b->n_x, b->x_scale + r);
    }
}

static void feed_forward(buffers_t *b, int64_t n_rows, const layer_t *layer, float *x) {
    const int64_t n = layer->first.n_out, n_inner = round_up(n, 64);
    float y[n];
    matmul(b->x, n_rows, &layer->first, 0, n, b->sums);
    for (int64_t r = 0; r < n_rows; r++) {
        dequantise(b->sums + r * round_up(n, 32), b->x_scale[r], &layer->first, 0, n, y);
        for (int64_t i = 0; i < n; i++) y[i] = y[i] > 0 ? y[i] : 0;
        quantise(y, n, b->inner + r * n_inner, b->inner_scale + r);
    }
    add_and_norm(b, n_rows, &layer->second, &layer->feed_forward_norm, x);
}

/* The decoder's state for all sentences: the tensors of `Cells` in cells.py. */
typedef struct {
    kv_t *cells;       /* layers x sentences x heads x cells x (key, value) */
    int64_t *new_cell; /* sentences x hypotheses: the cell for the key and the value of this step */
    float *hidden;     /* sentences x hypotheses x cells: 0 if the cell is in the hypothesis's past, else -inf */
    kv_t *keys;        /* layers x sentences x heads x d_k x lanes */
    kv_t *values;      /* layers x sentences x heads x lanes x d_v */
    float *unseen;     /* sentences x lanes: 0 if the source has a token there, else -inf */
    int64_t *n_source, *length;
    int64_t n_sentences, n_kept; /* n_kept: hypotheses per sentence */
    int64_t n_cells, end;        /* end: cells from here on are in no past */
    int64_t n_lanes;             /* source positions with padding, a multiple of LANES */
} state_t;

/* Encoder: each position attends to all positions of its sentence. The rows of the sentences are consecutive, without
   padding. */

/* padded_length: the highest number of rows of a sentence. */
static void attend_in_encoder(const model_t *m, buffers_t *b, const matrix_t *W, const int64_t *n_source,
                              int64_t n_sentences, int64_t n_rows, int64_t padded_length) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_all = W->n_out;
    const int64_t n_queries = n_heads * d_k;
    const int64_t n_scores = round_up(padded_length, LANES), n_head = n_heads * d_v;
    float score[MAX_QUERIES * n_scores], head[MAX_QUERIES * n_head], y[n_all];
    float *query = malloc(padded_length * n_queries * sizeof(float));
    kv_t *kv = malloc(padded_length * n_heads * width * sizeof(kv_t));
    matmul(b->x, n_rows, W, 0, n_all, b->sums);
    for (int64_t sentence = 0, first = 0; sentence < n_sentences; first += n_source[sentence++]) {
        int64_t n = n_source[sentence];
        for (int64_t i = 0; i < n; i++) {
            dequantise(b->sums + (first + i) * round_up(n_all, 32), b->x_scale[first + i], W, 0, n_all, y);
            memcpy(query + i * n_queries, y, n_queries * sizeof(float));
            store_kv(y + n_queries, n_heads * width, kv + i * n_heads * width);
        }
        for (int64_t i = 0, n_together; i < n; i += n_together) {
            n_together = n - i < MAX_QUERIES ? n - i : MAX_QUERIES;
            for (int64_t h = 0; h < n_heads; h++) {
                const kv_t *key = kv + h * width;
                for (int64_t q = 0; q < n_together; q++) {
                    const float *head_query = query + (i + q) * n_queries + h * d_k;
                    dot_products(head_query, d_k, n, key, n_heads * width, NULL, 0, score + q * n_scores);
                    softmax(score + q * n_scores, n);
                }
                weighted_sums(n_together, score, n_scores, n, key + d_k, n_heads * width, 0, d_v, head + h * d_v,
                              n_head);
            }
            for (int64_t r = first + i; r < first + i + n_together; r++)
                quantise(head + (r - first - i) * n_head, n_head, b->inner + r * round_up(n_head, 64),
                         b->inner_scale + r);
        }
    }
    free(kv), free(query);
}

/* Sentences that enter the search. */
typedef struct {
    const int64_t *source; /* sentences x padded_length, padded with pad_id */
    const int64_t *places; /* the index of each among all sentences of the state */
    const int64_t *number, *limit;
    int64_t n, padded_length, pad_id, bos_id;
    const float *positions; /* positions x d_model */
} arrivals_t;

/* Computes the decoder layers' keys and values of the memory from the encoder's output, consecutive rows in b->x. */
static void project_memory(const model_t *m, buffers_t *b, const state_t *s, const int64_t *places,
                           int64_t n_sentences, int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads, n_lanes = s->n_lanes;
    float y[n_heads * (d_k + d_v)];
    kv_t kv[n_heads * (d_k + d_v)];
    for (int64_t l = 0; l < m->n_decoder; l++) {
        const matrix_t *W = &m->decoder[l].memory_KV;
        int64_t row = 0;
        matmul(b->x, n_rows, W, 0, W->n_out, b->sums);
        for (int64_t i = 0; i < n_sentences; i++)
            for (int64_t at = 0; at < s->n_source[places[i]]; at++, row++) {
                dequantise(b->sums + row * round_up(W->n_out, 32), b->x_scale[row], W, 0, W->n_out, y);
                store_kv(y, W->n_out, kv);
                for (int64_t h = 0; h < n_heads; h++) {
                    int64_t place = (l * s->n_sentences + places[i]) * n_heads + h;
                    const kv_t *key = kv + h * (d_k + d_v);
                    for (int64_t d = 0; d < d_k; d++) s->keys[(place * d_k + d) * n_lanes + at] = key[d];
                    memcpy(s->values + (place * n_lanes + at) * d_v, key + d_k, d_v * sizeof(kv_t));
                }
            }
    }
}

/* The scaled embedding of a token plus its position. */
static inline void embed(const model_t *m, const float *embedding, int64_t id, const float *position, float *x) {
    const float *token = embedding + id * m->d_model;
    for (int64_t d = 0; d < m->d_model; d++) x[d] = token[d] * m->embedding_scale + position[d];
}

static int64_t embed_source(const model_t *m, const arrivals_t *a, int64_t sentence, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++)
        embed(m, m->source_embedding, a->source[sentence * a->padded_length + i], a->positions + i * m->d_model,
              x + i * m->d_model);
    return n;
}

/* Encodes new sentences, and writes the fields of the state that depend on the source alone. */
void encode(const model_t *m, const state_t *s, const arrivals_t *a) {
    const int64_t max_n = a->padded_length > ROWS_PER_PASS ? a->padded_length : ROWS_PER_PASS, n_x = m->d_model;
    int64_t n_source[a->n];
    for (int64_t i = 0; i < a->n; i++) {
        n_source[i] = 0;
        while (n_source[i] < a->padded_length && a->source[i * a->padded_length + n_source[i]] != a->pad_id)
            n_source[i]++;
        s->n_source[a->places[i]] = n_source[i];
        float *unseen = s->unseen + a->places[i] * s->n_lanes;
        for (int64_t c = 0; c < s->n_lanes; c++) unseen[c] = c < n_source[i] ? 0 : MINUS_INFINITE.value;
    }
    buffers_t b = allocate_buffers(m, max_n);
    float *x = malloc(max_n * n_x * sizeof(float));
    for (int64_t begin = 0, n; begin < a->n; begin += n) {
        int64_t n_rows = 0;
        for (n = 0; begin + n < a->n && n_rows + n_source[begin + n] <= max_n; n++)
            n_rows += embed_source(m, a, begin + n, n_source[begin + n], x + n_rows * n_x);
        for (int64_t row = 0; row < n_rows; row++)
            quantise(x + row * n_x, n_x, b.x + row * b.n_x, b.x_scale + row);
        for (int64_t l = 0; l < m->n_encoder; l++) {
            attend_in_encoder(m, &b, &m->encoder[l].Q_KV, n_source + begin, n, n_rows, a->padded_length);
            add_and_norm(&b, n_rows, &m->encoder[l].O, &m->encoder[l].self_norm, x);
            feed_forward(&b, n_rows, m->encoder + l, x);
        }
        project_memory(m, &b, s, a->places + begin, n, n_rows);
    }
    free(x);
    free_buffers(b);
}

/* Decoder. `rows` lists the hypotheses to compute, as indices among all hypotheses of all sentences, in ascending
   order. */

/* Stores the new key and value of each hypothesis in its cell, then attends to its past. */
static void attend_to_past(const model_t *m, buffers_t *b, const state_t *s, int64_t l, const int64_t *rows,
                           int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, width = d_k + d_v, n_heads = m->n_heads, n_cells = s->n_cells;
    const matrix_t *W = &m->decoder[l].Q_KV;
    const int64_t n_all = W->n_out;
    float x[n_all], score[round_up(s->end, LANES)], head[n_heads * d_v];
    int64_t seen[s->end];
    matmul(b->x, n_rows, W, 0, n_all, b->sums);
    for (int64_t i = 0; i < n_rows; i++) {
        int64_t row = rows[i], n = 0;
        dequantise(b->sums + i * round_up(n_all, 32), b->x_scale[i], W, 0, n_all, x);
        kv_t *cells = s->cells + (l * s->n_sentences + row / s->n_kept) * n_heads * n_cells * width;
        for (int64_t h = 0; h < n_heads; h++)
            store_kv(x + n_heads * d_k + h * width, width, cells + (h * n_cells + s->new_cell[row]) * width);
        for (int64_t c = 0; c < s->end; c++) {
            seen[n] = c;
            n += s->hidden[row * n_cells + c] == 0;
        }
        for (int64_t h = 0; h < n_heads; h++) {
            const kv_t *past = cells + h * n_cells * width;
            dot_products(x + h * d_k, d_k, n, past, width, seen, n_cells * width, score);
            softmax(score, n);
            weighted_sums_of(1, score, 0, n, past + d_k, width, seen, n_cells * width, d_v, head + h * d_v, 0);
        }
        quantise(head, n_heads * d_v, b->inner + i * round_up(n_heads * d_v, 64), b->inner_scale + i);
    }
}

static void attend_to_memory(const model_t *m, buffers_t *b, const state_t *s, int64_t l, const int64_t *rows,
                             int64_t n_rows) {
    const int64_t d_k = m->d_k, d_v = m->d_v, n_heads = m->n_heads, n_lanes = s->n_lanes;
    const matrix_t *W = &m->decoder[l].memory_Q;
    const int64_t n_x = W->n_out, n_head = n_heads * d_v;
    float x[MAX_QUERIES * n_x], score[MAX_QUERIES * n_lanes], head[MAX_QUERIES * n_head];
    matmul(b->x, n_rows, W, 0, n_x, b->sums);
    for (int64_t i = 0, n_q; i < n_rows; i += n_q) { /* n_q: consecutive hypotheses of one sentence */
        const int64_t sentence = rows[i] / s->n_kept, n = s->n_source[sentence];
        for (n_q = 0; n_q < MAX_QUERIES && i + n_q < n_rows && rows[i + n_q] / s->n_kept == sentence; n_q++)
            dequantise(b->sums + (i + n_q) * round_up(n_x, 32), b->x_scale[i + n_q], W, 0, n_x, x + n_q * n_x);
        for (int64_t h = 0; h < n_heads; h++) {
            int64_t place = (l * s->n_sentences + sentence) * n_heads + h;
            const kv_t *key = s->keys + place * d_k * n_lanes, *value = s->values + place * n_lanes * d_v;
            /* Keys are stored transposed, so the scores, too, are weighted sums of rows. */
            weighted_sums(n_q, x + h * d_k, n_x, d_k, key, n_lanes, d_k * n_lanes, n, score, n_lanes);
            for (int64_t q = 0; q < n_q; q++) softmax(score + q * n_lanes, n);
            weighted_sums(n_q, score, n_lanes, n, value, d_v, n_lanes * d_v, d_v, head + h * d_v, n_head);
        }
        for (int64_t q = 0; q < n_q; q++)
            quantise(head + q * n_head, n_head, b->inner + (i + q) * round_up(n_head, 64), b->inner_scale + i + q);
    }
}

/* The highest logit of each group, and the logarithm of the sum of exp of all logits. The logits are computed block by
   block and are not stored. `sums` has room for one block. */
static void find_peaks(const matrix_t *W, const element_t *x, const float *x_scale, int64_t n_rows, sum_t *sums,
                       float *peak, float *log_sum) {
    const int64_t n_groups = round_up(W->n_out, GROUP) / GROUP;
    float *highest = malloc(n_rows * sizeof(float)), *exp_sums = calloc(n_rows * LANES, sizeof(float));
    for (int64_t row = 0; row < n_rows; row++) highest[row] = LOWEST;
    for (int64_t first = 0; first < W->n_out; first += BLOCK) {
        const int64_t n = W->n_out - first < BLOCK ? W->n_out - first : BLOCK, stride = round_up(n, 32);
        matmul(x, n_rows, W, first, n, sums);
        for (int64_t row = 0; row < n_rows; row++) {
            __m512 exp_sum = _mm512_loadu_ps(exp_sums + row * LANES);
            for (int64_t at = 0; at < n; at += 4 * GROUP) {
                __m512 logit[8], group[4];
                for (int i = 0; i < 8; i++) {
                    const int64_t c = at + i * LANES;
                    logit[i] = dequantise_vector(sums + row * stride + c, x_scale[row], W, first + c, TAIL_MASK(n - c));
                }
                for (int i = 0; i < 4; i++) group[i] = _mm512_max_ps(logit[2 * i], logit[2 * i + 1]);
                const __m128 four_peaks = reduce_four(0, group);
                const int64_t at_group = (first + at) / GROUP;
                _mm_mask_storeu_ps(peak + row * n_groups + at_group, TAIL_MASK(n_groups - at_group), four_peaks);
                const float top = _mm512_reduce_max_ps(_mm512_broadcast_f32x4(four_peaks));
                if (top > highest[row]) { /* rare after the first iteration */
                    exp_sum = _mm512_mul_ps(exp_sum, exp_nonpositive(_mm512_set1_ps(highest[row] - top)));
                    highest[row] = top;
                }
                const __m512 shift = _mm512_set1_ps(highest[row]);
                for (int i = 0; i < 8; i++)
                    exp_sum = _mm512_add_ps(exp_sum, exp_nonpositive(_mm512_sub_ps(logit[i], shift)));
            }
            _mm512_storeu_ps(exp_sums + row * LANES, exp_sum);
        }
    }
    for (int64_t row = 0; row < n_rows; row++)
        log_sum[row] = highest[row] + logf(_mm512_reduce_add_ps(_mm512_loadu_ps(exp_sums + row * LANES)));
    free(highest), free(exp_sums);
}

typedef struct {
    element_t *x; /* quantised rows from which logits are computed: round_up(rows, 32) x round_up(d_model, 64) */
    float *scale, *peak, *log_sum;
} step_output_t;

/* All decoder layers and the peaks. `x`: the embeddings of the last tokens, rows x d_model, which are overwritten. */
static void decode(const model_t *m, const state_t *s, const int64_t *rows, int64_t n_rows, float *x,
                   step_output_t out) {
    buffers_t b = allocate_buffers(m, n_rows < ROWS_PER_PASS ? n_rows : ROWS_PER_PASS);
    for (int64_t begin = 0, n; begin < n_rows; begin += n) {
        n = n_rows - begin < ROWS_PER_PASS ? n_rows - begin : ROWS_PER_PASS;
        float *block = x + begin * m->d_model;
        for (int64_t row = 0; row < n; row++)
            quantise(block + row * m->d_model, m->d_model, b.x + row * b.n_x, b.x_scale + row);
        for (int64_t l = 0; l < m->n_decoder; l++) {
            const layer_t *layer = m->decoder + l;
            attend_to_past(m, &b, s, l, rows + begin, n);
            add_and_norm(&b, n, &layer->O, &layer->self_norm, block);
            attend_to_memory(m, &b, s, l, rows + begin, n);
            add_and_norm(&b, n, &layer->memory_O, &layer->memory_norm, block);
            feed_forward(&b, n, layer, block);
        }
        memcpy(out.x + begin * b.n_x, b.x, n * b.n_x * sizeof(element_t));
        memcpy(out.scale + begin, b.x_scale, n * sizeof(float));
    }
    free_buffers(b);
    sum_t *sums = malloc(round_up(n_rows, 32) * BLOCK * sizeof(sum_t));
    find_peaks(&m->output, out.x, out.scale, n_rows, sums, out.peak, out.log_sum);
    free(sums);
}

/* One decoder step for all hypotheses. */
void step(const model_t *m, const state_t *s, float *x, element_t *out, float *out_scale, float *peak,
          float *log_sum) {
    const int64_t n = s->n_sentences * s->n_kept;
    int64_t *rows = malloc(n * sizeof(int64_t));
    for (int64_t row = 0; row < n; row++) rows[row] = row;
    decode(m, s, rows, n, x, (step_output_t){out, out_scale, peak, log_sum});
    free(rows);
}

#include "search.h"
