/* What attention does with vectors, for native.c: softmax, a query times keys, values times weights. */

#define LANES 16
#define REST(n) ((n) >= LANES ? 0xffff : (n) <= 0 ? 0 : (1u << (n)) - 1) /* of a vector, what is left */
#define LOWEST -2e38f /* for -inf, which -ffinite-math-only excludes; finite, too, times log2(e) */

/* e^x for x <= 0: 2^k 2^r with |r| <= 1/2, by the first terms of its series. Off by less than 4e-7 of it. */
INLINE __m512 exp_of(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 k = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT), r = _mm512_sub_ps(power, k);
    const float terms[] = {1.33335581e-3f, 9.61812911e-3f, 0.0555041087f, 0.240226507f, 0.693147181f, 1};
    __m512 y = _mm512_set1_ps(1.54035304e-4f);
    for (int i = 0; i < 6; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(y, k);
}

INLINE __m512 either(const int is_sum, __m512 x, __m512 y) { return is_sum ? _mm512_add_ps(x, y) : _mm512_max_ps(x, y); }

/* The sums of four vectors, or the highest of each. */
INLINE __m128 fold(const int is_sum, const __m512 *x) {
    const __m512 one = either(is_sum, _mm512_unpacklo_ps(x[0], x[2]), _mm512_unpackhi_ps(x[0], x[2]));
    const __m512 other = either(is_sum, _mm512_unpacklo_ps(x[1], x[3]), _mm512_unpackhi_ps(x[1], x[3]));
    __m512 all = either(is_sum, _mm512_unpacklo_ps(one, other), _mm512_unpackhi_ps(one, other));
    all = either(is_sum, all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_castps512_ps128(either(is_sum, all, _mm512_shuffle_f32x4(all, all, 0xb1)));
}

/* score: with room for whole vectors. */
INLINE void softmax(float *score, int64_t n) {
    const __m512 lowest = _mm512_set1_ps(LOWEST);
    __m512 top = lowest, sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES)
        top = _mm512_max_ps(top, _mm512_mask_loadu_ps(lowest, REST(n - i), score + i));
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 share = exp_of(_mm512_sub_ps(_mm512_loadu_ps(score + i), top));
        _mm512_storeu_ps(score + i, share);
        sum = _mm512_mask_add_ps(sum, REST(n - i), sum, share);
    }
    const __m512 by = _mm512_set1_ps(1 / _mm512_reduce_add_ps(sum));
    for (int64_t i = 0; i < n; i += LANES) _mm512_storeu_ps(score + i, _mm512_mul_ps(_mm512_loadu_ps(score + i), by));
}

/* Keys and values are kept in half the bytes where products are rounded more than that anyway: with many sentences side
   by side they leave the caches. */
#ifdef FLOAT32
static inline __m512 load(__mmask16 is_in, const kept *x) { return _mm512_maskz_loadu_ps(is_in, x); }
static inline void keep(const float *x, int64_t n, kept *out) { memcpy(out, x, n * sizeof(float)); }
#else
static inline __m512 load(__mmask16 is_in, const kept *x) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(is_in, x));
}

static inline void keep(const float *x, int64_t n, kept *out) {
    const __m512 top = _mm512_set1_ps(65504), bottom = _mm512_set1_ps(-65504); /* float16 has no more */
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 own = _mm512_max_ps(_mm512_min_ps(_mm512_maskz_loadu_ps(REST(n - i), x + i), top), bottom);
        _mm256_mask_storeu_epi16(out + i, REST(n - i), _mm512_cvtps_ph(own, _MM_FROUND_TO_NEAREST_INT));
    }
}
#endif

/* And what lies so far ahead, of the next head or sentence, is fetched meanwhile. */
INLINE __m512 next(__mmask16 is_in, const kept *x, int64_t ahead) {
    _mm_prefetch((const char *)(x + ahead), _MM_HINT_T0);
    return load(is_in, x);
}

#define ROW(j) (rows + (which ? which[j] : (j)) * stride) /* those that `which` says, or all */

/* A query times so many rows. Four at a time, so that sums do not wait for each other, and are added up together. */
INLINE void dots(const float *query, int64_t width, int64_t n, const kept *rows, int64_t stride, const int64_t *which,
                 int64_t ahead, float *out) {
    for (int64_t j = 0; j < n; j += 4) {
        const kept *row[4];
        __m512 sum[4];
        for (int i = 0; i < 4; i++) row[i] = ROW(j + i < n ? j + i : j), sum[i] = _mm512_setzero_ps();
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 own = _mm512_maskz_loadu_ps(REST(width - k), query + k);
            for (int i = 0; i < 4; i++) sum[i] = _mm512_fmadd_ps(own, next(REST(width - k), row[i] + k, ahead), sum[i]);
        }
        _mm_mask_storeu_ps(out + j, REST(n - j), fold(1, sum));
    }
}

/* Just these two: what _mm512_add_ps adds up, a compiler may add up in another order, for other queries in another. */
INLINE __m512 plus(__m512 x, __m512 y) { return _mm512_add_round_ps(x, y, _MM_FROUND_CUR_DIRECTION); }

#define TOGETHER 4 /* queries that are given the same rows */

/* For each query, rows, each times a weight, added up: so many vectors of them. Always four sums at a time, so that none
   waits for the one before it: where there are fewer vectors, of every second or every fourth row. */
INLINE void weighted_sums_in_vectors(const int n_queries, const int n_vectors, const float *weight, int64_t n_weights, int64_t n,
                        const kept *rows, int64_t stride, const int64_t *which, int64_t ahead, int64_t width,
                        float *out, int64_t n_out) {
    const int n_parts = 4 / n_vectors;
    __m512 sum[TOGETHER][4];
    for (int q = 0; q < n_queries; q++)
        for (int i = 0; i < 4; i++) sum[q][i] = _mm512_setzero_ps();
    int64_t j = 0;
    for (; n - j >= n_parts; j += n_parts)
        for (int i = 0; i < 4; i++) {
            const int part = i / n_vectors, at = i % n_vectors * LANES;
            const __m512 own = next(REST(width - at), ROW(j + part) + at, ahead);
            for (int q = 0; q < n_queries; q++)
                sum[q][i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[q * n_weights + j + part]), own, sum[q][i]);
        }
    for (; j < n; j++)
        for (int i = 0; i < n_vectors; i++) {
            const __m512 own = next(REST(width - i * LANES), ROW(j) + i * LANES, ahead);
            for (int q = 0; q < n_queries; q++)
                sum[q][i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[q * n_weights + j]), own, sum[q][i]);
        }
    for (int q = 0; q < n_queries; q++) {
        if (n_vectors <= 2) sum[q][0] = plus(sum[q][0], sum[q][2]), sum[q][1] = plus(sum[q][1], sum[q][3]);
        if (n_vectors == 1) sum[q][0] = plus(sum[q][0], sum[q][1]);
        for (int i = 0; i < n_vectors; i++)
            _mm512_mask_storeu_ps(out + q * n_out + i * LANES, REST(width - i * LANES), sum[q][i]);
    }
}

INLINE void weighted_sums_of(const int n_queries, const float *weight, int64_t n_weights, int64_t n, const kept *rows,
                    int64_t stride, const int64_t *which, int64_t ahead, int64_t width, float *out, int64_t n_out) {
    for (int64_t first = 0; first < width; first += 4 * LANES) {
        const int64_t left = width - first;
        if (left <= LANES)
            weighted_sums_in_vectors(n_queries, 1, weight, n_weights, n, rows + first, stride, which, ahead, left, out + first, n_out);
        else if (left <= 2 * LANES)
            weighted_sums_in_vectors(n_queries, 2, weight, n_weights, n, rows + first, stride, which, ahead, left, out + first, n_out);
        else
            weighted_sums_in_vectors(n_queries, 4, weight, n_weights, n, rows + first, stride, which, ahead, left, out + first, n_out);
    }
}
#undef ROW

/* For each of up to TOGETHER queries; n_weights and n_out are from one of them to the next. What comes of a query is the
   same, to the bit, whatever others there are (tested, and so not static). */
void weighted_sums(int n_queries, const float *weight, int64_t n_weights, int64_t n, const kept *rows, int64_t stride,
                int64_t ahead, int64_t width, float *out, int64_t n_out) {
    switch (n_queries) {
    case 1: weighted_sums_of(1, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    case 2: weighted_sums_of(2, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    case 3: weighted_sums_of(3, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    default: weighted_sums_of(TOGETHER, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out);
    }
}
