/* Vector operations of attention, for native.c: softmax, products of a query and keys, weighted sums of values. */

#define LANES 16 /* floats in a vector register */
#define TAIL_MASK(n) ((n) >= LANES ? 0xffff : (n) <= 0 ? 0 : (1u << (n)) - 1) /* the first n lanes, at most all */
#define LOWEST -2e38f /* instead of -inf, which -ffinite-math-only excludes; still finite after times log2(e) */

/* e^x for x <= 0, as 2^k 2^r with integer k and |r| <= 1/2: the first terms of the series of 2^r. The relative error is
   below 4e-7. */
INLINE __m512 exp_nonpositive(__m512 x) {
    const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 k = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT), r = _mm512_sub_ps(power, k);
    const float terms[] = {1.33335581e-3f, 9.61812911e-3f, 0.0555041087f, 0.240226507f, 0.693147181f, 1};
    __m512 y = _mm512_set1_ps(1.54035304e-4f);
    for (int i = 0; i < 6; i++) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(y, k);
}

INLINE __m512 add_or_max(const int is_sum, __m512 x, __m512 y) {
    return is_sum ? _mm512_add_ps(x, y) : _mm512_max_ps(x, y);
}

/* Reduces each of four vectors to one number: the sum of its lanes, or the highest. */
INLINE __m128 reduce_four(const int is_sum, const __m512 *x) {
    const __m512 even = add_or_max(is_sum, _mm512_unpacklo_ps(x[0], x[2]), _mm512_unpackhi_ps(x[0], x[2]));
    const __m512 odd = add_or_max(is_sum, _mm512_unpacklo_ps(x[1], x[3]), _mm512_unpackhi_ps(x[1], x[3]));
    __m512 all = add_or_max(is_sum, _mm512_unpacklo_ps(even, odd), _mm512_unpackhi_ps(even, odd));
    all = add_or_max(is_sum, all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return _mm512_castps512_ps128(add_or_max(is_sum, all, _mm512_shuffle_f32x4(all, all, 0xb1)));
}

/* In place. `score` has room for whole vectors; elements from n on are overwritten. */
INLINE void softmax(float *score, int64_t n) {
    const __m512 lowest = _mm512_set1_ps(LOWEST);
    __m512 highest = lowest, sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += LANES)
        highest = _mm512_max_ps(highest, _mm512_mask_loadu_ps(lowest, TAIL_MASK(n - i), score + i));
    highest = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    for (int64_t i = 0; i < n; i += LANES) {
        const __m512 weight = exp_nonpositive(_mm512_sub_ps(_mm512_loadu_ps(score + i), highest));
        _mm512_storeu_ps(score + i, weight);
        sum = _mm512_mask_add_ps(sum, TAIL_MASK(n - i), sum, weight);
    }
    const __m512 factor = _mm512_set1_ps(1 / _mm512_reduce_add_ps(sum));
    for (int64_t i = 0; i < n; i += LANES)
        _mm512_storeu_ps(score + i, _mm512_mul_ps(_mm512_loadu_ps(score + i), factor));
}

/* With int8 products, keys and values are stored as float16: the products are rounded more than that anyway, and in
   float32 the keys and values of many sentences do not fit into the caches. */
#ifdef FLOAT32
static inline __m512 load_kv(__mmask16 mask, const kv_t *x) { return _mm512_maskz_loadu_ps(mask, x); }
static inline void store_kv(const float *x, int64_t n, kv_t *out) { memcpy(out, x, n * sizeof(float)); }
#else
static inline __m512 load_kv(__mmask16 mask, const kv_t *x) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x));
}

static inline void store_kv(const float *x, int64_t n, kv_t *out) {
    const __m512 top = _mm512_set1_ps(65504), bottom = _mm512_set1_ps(-65504); /* the range of finite float16 */
    for (int64_t i = 0; i < n; i += LANES) {
        __m512 clamped = _mm512_max_ps(_mm512_min_ps(_mm512_maskz_loadu_ps(TAIL_MASK(n - i), x + i), top), bottom);
        _mm256_mask_storeu_epi16(out + i, TAIL_MASK(n - i), _mm512_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT));
    }
}
#endif

/* Also prefetches the element `ahead` elements further on: the same place of the next head or sentence. */
INLINE __m512 load_kv_prefetching(__mmask16 mask, const kv_t *x, int64_t ahead) {
    _mm_prefetch((const char *)(x + ahead), _MM_HINT_T0);
    return load_kv(mask, x);
}

/* `index` lists the rows that are used; NULL means all rows. */
#define ROW(j) (rows + (index ? index[j] : (j)) * stride)

/* Dot products of a query and n rows. Four rows at a time: four independent sums, which are reduced together. */
INLINE void dot_products(const float *query, int64_t width, int64_t n, const kv_t *rows, int64_t stride,
                         const int64_t *index, int64_t ahead, float *out) {
    for (int64_t j = 0; j < n; j += 4) {
        const kv_t *row[4];
        __m512 sum[4];
        for (int i = 0; i < 4; i++) row[i] = ROW(j + i < n ? j + i : j), sum[i] = _mm512_setzero_ps();
        for (int64_t k = 0; k < width; k += LANES) {
            const __m512 x = _mm512_maskz_loadu_ps(TAIL_MASK(width - k), query + k);
            for (int i = 0; i < 4; i++)
                sum[i] = _mm512_fmadd_ps(x, load_kv_prefetching(TAIL_MASK(width - k), row[i] + k, ahead), sum[i]);
        }
        _mm_mask_storeu_ps(out + j, TAIL_MASK(n - j), reduce_four(1, sum));
    }
}

/* An addition that the compiler does not reorder. With -fassociative-math it may reorder _mm512_add_ps, and the order
   may depend on the number of queries. */
INLINE __m512 add_in_order(__m512 x, __m512 y) { return _mm512_add_round_ps(x, y, _MM_FROUND_CUR_DIRECTION); }

#define MAX_QUERIES 4 /* queries that share the loads of rows */

/* For each query the weighted sum of the rows, of which n_vectors vectors are used: 1, 2 or 4. There are always four
   independent sums per query, which hides the latency of multiply-adds: with fewer than four vectors, every second or
   every fourth row goes to the same sum. */
INLINE void weighted_sums_of_vectors(const int n_queries, const int n_vectors, const float *weight, int64_t n_weights,
                                     int64_t n, const kv_t *rows, int64_t stride, const int64_t *index, int64_t ahead,
                                     int64_t width, float *out, int64_t n_out) {
    const int n_parts = 4 / n_vectors;
    __m512 sum[MAX_QUERIES][4];
    for (int q = 0; q < n_queries; q++)
        for (int i = 0; i < 4; i++) sum[q][i] = _mm512_setzero_ps();
    int64_t j = 0;
    for (; n - j >= n_parts; j += n_parts)
        for (int i = 0; i < 4; i++) {
            const int part = i / n_vectors, at = i % n_vectors * LANES;
            const __m512 x = load_kv_prefetching(TAIL_MASK(width - at), ROW(j + part) + at, ahead);
            for (int q = 0; q < n_queries; q++)
                sum[q][i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[q * n_weights + j + part]), x, sum[q][i]);
        }
    for (; j < n; j++)
        for (int i = 0; i < n_vectors; i++) {
            const __m512 x = load_kv_prefetching(TAIL_MASK(width - i * LANES), ROW(j) + i * LANES, ahead);
            for (int q = 0; q < n_queries; q++)
                sum[q][i] = _mm512_fmadd_ps(_mm512_set1_ps(weight[q * n_weights + j]), x, sum[q][i]);
        }
    for (int q = 0; q < n_queries; q++) {
        if (n_vectors <= 2) {
            sum[q][0] = add_in_order(sum[q][0], sum[q][2]);
            sum[q][1] = add_in_order(sum[q][1], sum[q][3]);
        }
        if (n_vectors == 1) sum[q][0] = add_in_order(sum[q][0], sum[q][1]);
        for (int i = 0; i < n_vectors; i++)
            _mm512_mask_storeu_ps(out + q * n_out + i * LANES, TAIL_MASK(width - i * LANES), sum[q][i]);
    }
}

INLINE void weighted_sums_of(const int n_queries, const float *weight, int64_t n_weights, int64_t n, const kv_t *rows,
                             int64_t stride, const int64_t *index, int64_t ahead, int64_t width, float *out,
                             int64_t n_out) {
    for (int64_t first = 0; first < width; first += 4 * LANES) {
        const int64_t n_left = width - first;
        if (n_left <= LANES)
            weighted_sums_of_vectors(n_queries, 1, weight, n_weights, n, rows + first, stride, index, ahead, n_left,
                                     out + first, n_out);
        else if (n_left <= 2 * LANES)
            weighted_sums_of_vectors(n_queries, 2, weight, n_weights, n, rows + first, stride, index, ahead, n_left,
                                     out + first, n_out);
        else
            weighted_sums_of_vectors(n_queries, 4, weight, n_weights, n, rows + first, stride, index, ahead, n_left,
                                     out + first, n_out);
    }
}
#undef ROW

/* The weighted sums of up to MAX_QUERIES queries. n_weights and n_out are the strides from one query to the next. The
   result of a query is the same, bit for bit, with any other queries. Not static, because a test calls it. */
void weighted_sums(int n_queries, const float *weight, int64_t n_weights, int64_t n, const kv_t *rows, int64_t stride,
                   int64_t ahead, int64_t width, float *out, int64_t n_out) {
    switch (n_queries) {
    case 1: weighted_sums_of(1, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    case 2: weighted_sums_of(2, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    case 3: weighted_sums_of(3, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out); break;
    default: weighted_sums_of(MAX_QUERIES, weight, n_weights, n, rows, stride, NULL, ahead, width, out, n_out);
    }
}
