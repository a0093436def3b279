/* One turn of a search: the decoder step, the best continuations, and the new hypotheses. Included by native.c. It is
   the fast twin of `turn` in search/loop.py, for plain searches (see `SearchSettings.is_plain`). Finished
   sentences and places without a live hypothesis are skipped: a fifth of all rows. */

/* The logits of some groups, computed again: 32 columns of one row each. */
void logits_of_groups(const model_t *m, const element_t *x, const float *x_scale, const int64_t *row,
                      const int64_t *group, int64_t n, float *out) {
    const matrix_t *W = &m->output;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = group[i] * GROUP, n_columns = W->n_out - first < GROUP ? W->n_out - first : GROUP;
        sum_t sums[GROUP];
        matmul_group(x + row[i] * round_up(W->n_in, 64), W, first, sums);
        dequantise(sums, x_scale[row[i]], W, first, n_columns, out + i * GROUP);
        for (int64_t c = n_columns; c < GROUP; c++) out[i * GROUP + c] = LOWEST;
    }
}

/* All logits: rows x columns of the output matrix. */
void all_logits(const model_t *m, const element_t *x, const float *x_scale, int64_t n_rows, float *out) {
    const matrix_t *W = &m->output;
    sum_t *sums = malloc(round_up(n_rows, 32) * BLOCK * sizeof(sum_t));
    for (int64_t first = 0; first < W->n_out; first += BLOCK) {
        const int64_t n = W->n_out - first < BLOCK ? W->n_out - first : BLOCK;
        matmul(x, n_rows, W, first, n, sums);
        for (int64_t row = 0; row < n_rows; row++)
            dequantise(sums + row * round_up(n, 32), x_scale[row], W, first, n, out + row * W->n_out + first);
    }
    free(sums);
}

/* Gives each hypothesis in `rows` the first cell that is in the past of no hypothesis of its sentence. Afterwards the
   cell is in the past of this hypothesis only. Hypotheses that are not in `rows` have no past. Returns the first cell
   after the last one in use; or -1 if there are too few cells, in which case `hidden` is unchanged. */
static int64_t take_cells_of(const state_t *s, const int64_t *rows, int64_t n_rows) {
    const int64_t n_kept = s->n_kept, n_cells = s->n_cells;
    int64_t end = 0;
    for (int64_t first = 0, n; first < n_rows; first += n) {
        int64_t n_taken = 0;
        for (n = 1; first + n < n_rows && rows[first + n] / n_kept == rows[first] / n_kept;) n++;
        for (int64_t c = 0; c < n_cells; c++) {
            int is_used = 0;
            for (int64_t i = first; i < first + n; i++) is_used |= s->hidden[rows[i] * n_cells + c] == 0;
            if (!is_used && n_taken < n) s->new_cell[rows[first + n_taken++]] = c, is_used = 1;
            if (is_used && c >= end) end = c + 1;
        }
        if (n_taken < n) return -1;
    }
    for (int64_t i = 0; i < n_rows; i++) s->hidden[rows[i] * n_cells + s->new_cell[rows[i]]] = 0;
    return end;
}

int64_t take_cells(float *hidden, int64_t n_sentences, int64_t n_kept, int64_t n_cells, int64_t *new_cell) {
    const int64_t n = n_sentences * n_kept;
    const state_t s = {.new_cell = new_cell, .hidden = hidden, .n_kept = n_kept, .n_cells = n_cells};
    int64_t *rows = malloc(n * sizeof(int64_t));
    for (int64_t row = 0; row < n; row++) rows[row] = row;
    int64_t end = take_cells_of(&s, rows, n);
    free(rows);
    return end;
}

/* The best continuations */

typedef struct {
    const float *penalty;        /* states of the rules' automaton x tokens: 0 if the token is allowed, else -inf */
    const int64_t *next_state;   /* states x tokens: the state after the token */
    const float *length_penalty; /* by number of tokens: what a log-probability is divided by */
    int64_t eos_id, min_length, n_best, stop_early;
} search_settings_t;

/* The tensors of `Beams` in hypotheses.py, which are updated in place. */
typedef struct {
    int64_t *number, *limit, *length, *n_ended, *token, *last, *state, *ended_token, *ended_length;
    float *margin, *log_prob, *ended_log_prob, *ended_score;
    int64_t n_tokens; /* tokens that a hypothesis has room for */
    uint8_t *is_over;
} hypotheses_t;

/* Whether a log-probability marks a place without a live hypothesis, or a forbidden continuation. */
static inline int is_minus_infinite(float x) { return x < LOWEST / 3; }

/* A correctly rounded division: with -freciprocal-math, `/` may multiply by the reciprocal. */
static inline float divide(float x, float y) { return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(x), _mm_set_ss(y))); }

#define NO_TOKEN -1 /* NONE in hypotheses.py */

typedef struct { float value; int64_t parent, token; } candidate_t;

/* Inserts a candidate into the list of the best, which is sorted from the best down. Of equal candidates the earlier
   one stays ahead. Returns the new length of the list. */
static inline int64_t insert_candidate(candidate_t *best, int64_t n, int64_t max_n, candidate_t candidate) {
    if (n == max_n && candidate.value <= best[n - 1].value) return n;
    int64_t i = n < max_n ? n : n - 1;
    for (; i > 0 && best[i - 1].value < candidate.value; i--) best[i] = best[i - 1];
    best[i] = candidate;
    return n < max_n ? n + 1 : n;
}

/* The n_kept + 1 best continuations of one sentence, whose hypotheses are n_rows elements of `rows` from `first`. Reads
   only groups that may hold a candidate of at least `bound`. Returns the number of candidates. */
static int64_t best_in_groups(const model_t *m, const step_output_t *output, const hypotheses_t *b,
                              const search_settings_t *h, int64_t sentence, const int64_t *rows, int64_t first,
                              int64_t n_rows, int64_t n_kept, float bound, candidate_t *best) {
    const int64_t n_vocabulary = m->output.n_out, n_groups = round_up(n_vocabulary, GROUP) / GROUP;
    const int may_end = b->length[sentence] >= h->min_length;
    int64_t n = 0;
    for (int64_t i = first; i < first + n_rows; i++) {
        const float *penalty = h->penalty + b->state[rows[i]] * n_vocabulary;
        const float log_sum = output->log_sum[i], so_far = b->log_prob[rows[i]];
        for (int64_t g = 0; g < n_groups; g++) {
            float highest = output->peak[i * n_groups + g] - log_sum + so_far, logit[GROUP];
            if (highest < bound || (n > n_kept && highest <= best[n - 1].value)) continue;
            logits_of_groups(m, output->x, output->scale, &i, &g, 1, logit);
            for (int64_t token = g * GROUP; token < (g + 1) * GROUP && token < n_vocabulary; token++)
                if (!(penalty[token] < 0) && (may_end || token != h->eos_id))
                    n = insert_candidate(best, n, n_kept + 1,
                                         (candidate_t){logit[token - g * GROUP] - log_sum + so_far,
                                                       rows[i] - sentence * n_kept, token});
        }
    }
    return n;
}

/* The n_kept + 1 best continuations of one sentence, the best first. Returns the number of candidates. */
static int64_t best_continuations(const model_t *m, const step_output_t *output, const hypotheses_t *b,
                                  const search_settings_t *h, int64_t sentence, const int64_t *rows, int64_t first,
                                  int64_t n_rows, int64_t n_kept, candidate_t *best) {
    const int64_t n_groups = round_up(m->output.n_out, GROUP) / GROUP, max_n = n_kept + 1;
    /* Each peak is the value of a token. If all these tokens are allowed, the n-th best candidate is at least as good
       as the n-th best peak. */
    int64_t n = 0;
    for (int64_t i = first; i < first + n_rows; i++)
        for (int64_t g = 0; g < n_groups; g++) {
            float highest = output->peak[i * n_groups + g] - output->log_sum[i] + b->log_prob[rows[i]];
            if (n < max_n || highest > best[n - 1].value)
                n = insert_candidate(best, n, max_n, (candidate_t){highest, 0, 0});
        }
    float bound = n == max_n ? best[n - 1].value : LOWEST;
    bound -= 1e-4f * fabsf(bound); /* a logit that is computed again may be rounded to slightly less than its peak */
    n = best_in_groups(m, output, b, h, sentence, rows, first, n_rows, n_kept, bound, best);
    /* Some of these tokens may be forbidden. Groups that were not read may then hold better candidates than the last
       ones, so all groups down to the last candidate are read. */
    if (n < max_n || best[n - 1].value < bound) {
        bound = n < max_n ? LOWEST : best[n - 1].value - 1e-4f * fabsf(best[n - 1].value);
        n = best_in_groups(m, output, b, h, sentence, rows, first, n_rows, n_kept, bound, best);
    }
    return n;
}

/* The new hypotheses */

/* Replaces the row of each hypothesis of a sentence by its parent's row. Only the first n_bytes of a row are copied. */
static void reorder_by_parent(void *rows, int64_t stride, int64_t n_bytes, const candidate_t *best, int64_t n_kept,
                              char *scratch) {
    char *to = rows;
    for (int64_t k = 0; k < n_kept; k++) memcpy(scratch + k * n_bytes, to + k * stride, n_bytes);
    for (int64_t k = 0; k < n_kept; k++) memcpy(to + k * stride, scratch + best[k].parent * n_bytes, n_bytes);
}

/* Whether continuing the search cannot change the result of the sentence. */
static int is_over(const hypotheses_t *b, const search_settings_t *h, int64_t sentence, int64_t n_kept) {
    const float *score = b->ended_score + sentence * n_kept;
    float best = max_of(b->log_prob + sentence * n_kept, n_kept);
    if (is_minus_infinite(best) || b->length[sentence] >= b->limit[sentence]) return 1;
    if (!h->stop_early) return 0;
    /* A log-probability only falls, and the length penalty is largest at the limit. */
    float bound = divide(best, h->length_penalty[b->limit[sentence]]);
    int64_t n_as_good = 0;
    for (int64_t k = 0; k < b->n_ended[sentence]; k++) n_as_good += score[k] >= bound;
    return n_as_good >= h->n_best;
}

/* Makes the new hypotheses of one sentence from its n best continuations. */
static void advance(const state_t *s, const hypotheses_t *b, const search_settings_t *h, int64_t sentence,
                    int64_t n_vocabulary, const candidate_t *best, int64_t n, char *scratch) {
    const int64_t n_kept = s->n_kept, first = sentence * n_kept, n_open = n_kept - b->n_ended[sentence];
    const int64_t length = b->length[sentence] + 1, place = length - 1;
    if (n > n_open && n_open > 0) {
        float margin = best[n_open - 1].value - best[n_open].value;
        if (margin < b->margin[sentence]) b->margin[sentence] = margin;
    }
    reorder_by_parent(b->token + first * b->n_tokens, b->n_tokens * sizeof(int64_t), place * sizeof(int64_t), best,
                      n_kept, scratch);
    /* All cells, not only those before `end`: an ended hypothesis may have cells in its past beyond it. */
    reorder_by_parent(s->hidden + first * s->n_cells, s->n_cells * sizeof(float), s->n_cells * sizeof(float), best,
                      n_kept, scratch);
    reorder_by_parent(b->state + first, sizeof(int64_t), sizeof(int64_t), best, n_kept, scratch);
    for (int64_t k = 0; k < n_kept; k++) {
        const int64_t row = first + k, token = best[k].token;
        int64_t *tokens = b->token + row * b->n_tokens;
        tokens[place] = b->last[row] = token;
        b->state[row] = h->next_state[b->state[row] * n_vocabulary + token];
        b->log_prob[row] = k < n && k < n_open ? best[k].value : MINUS_INFINITE.value;
        if (k >= n || k >= n_open || token != h->eos_id) continue;
        const int64_t slot = first + b->n_ended[sentence]++;
        memcpy(b->ended_token + slot * b->n_tokens, tokens, (place + 1) * sizeof(int64_t));
        b->ended_log_prob[slot] = best[k].value;
        b->ended_score[slot] = divide(best[k].value, h->length_penalty[length]);
        b->ended_length[slot] = length;
        b->log_prob[row] = MINUS_INFINITE.value;
    }
    b->length[sentence] = length;
}

/* One turn for all sentences that are not over. `positions`: positions x d_model. Returns 0; or -1 if there are too few
   cells, in which case hypotheses and state are unchanged. */
int64_t turn(const model_t *m, state_t *s, const hypotheses_t *b, const search_settings_t *h, const float *positions) {
    const int64_t n_kept = s->n_kept, n_all = s->n_sentences * n_kept, n_x = m->d_model, n_cells = s->n_cells;
    int64_t *rows = calloc(n_all, sizeof(int64_t)), n_rows = 0;
    for (int64_t sentence = 0; sentence < s->n_sentences; sentence++) {
        b->is_over[sentence] = is_over(b, h, sentence, n_kept);
        for (int64_t row = sentence * n_kept; row < (sentence + 1) * n_kept; row++)
            if (!b->is_over[sentence] && !is_minus_infinite(b->log_prob[row])) rows[n_rows++] = row;
    }
    s->end = take_cells_of(s, rows, n_rows);
    if (s->end < 0 || n_rows == 0) { free(rows); return s->end; }

    const int64_t n_groups = round_up(m->output.n_out, GROUP) / GROUP;
    step_output_t output = {calloc(round_up(n_rows, 32) * round_up(n_x, 64), sizeof(element_t)),
                            malloc(n_rows * sizeof(float)), malloc(n_rows * n_groups * sizeof(float)),
                            malloc(n_rows * sizeof(float))};
    float *x = malloc(n_rows * n_x * sizeof(float));
    for (int64_t i = 0; i < n_rows; i++)
        embed(m, m->target_embedding, b->last[rows[i]], positions + b->length[rows[i] / n_kept] * n_x, x + i * n_x);
    decode(m, s, rows, n_rows, x, output);

    char *scratch = malloc(n_kept * ((1 + b->n_tokens) * sizeof(int64_t) + n_cells * sizeof(float)));
    candidate_t best[n_kept + 1];
    for (int64_t first = 0, n; first < n_rows; first += n) {
        const int64_t sentence = rows[first] / n_kept;
        for (n = 1; first + n < n_rows && rows[first + n] / n_kept == sentence;) n++;
        int64_t n_best = best_continuations(m, &output, b, h, sentence, rows, first, n, n_kept, best);
        for (int64_t i = n_best; i <= n_kept; i++) best[i] = (candidate_t){LOWEST, 0, 0};
        advance(s, b, h, sentence, m->output.n_out, best, n_best, scratch);
        b->is_over[sentence] = is_over(b, h, sentence, n_kept);
        s->length[sentence]++;
    }
    free(scratch), free(x), free(rows);
    free(output.x), free(output.scale), free(output.peak), free(output.log_sum);
    return 0;
}

/* Puts new sentences in the places of finished ones. Returns the length of the longest hypotheses of all sentences. */
int64_t enter(const model_t *m, const state_t *s, const hypotheses_t *b, const arrivals_t *a) {
    const int64_t n_kept = s->n_kept;
    encode(m, s, a);
    for (int64_t i = 0; i < a->n; i++) {
        const int64_t sentence = a->places[i];
        b->number[sentence] = a->number[i];
        b->limit[sentence] = a->limit[i];
        b->length[sentence] = b->n_ended[sentence] = s->length[sentence] = 0;
        b->margin[sentence] = INFINITE.value;
        for (int64_t row = sentence * n_kept; row < (sentence + 1) * n_kept; row++) {
            b->last[row] = a->bos_id;
            b->state[row] = b->ended_length[row] = 0;
            /* Before the first token all hypotheses are equal, so only one is live. */
            b->log_prob[row] = row == sentence * n_kept ? 0 : MINUS_INFINITE.value;
            b->ended_log_prob[row] = b->ended_score[row] = MINUS_INFINITE.value;
            for (int64_t t = row * b->n_tokens; t < (row + 1) * b->n_tokens; t++)
                b->token[t] = b->ended_token[t] = NO_TOKEN;
            for (int64_t c = row * s->n_cells; c < (row + 1) * s->n_cells; c++) s->hidden[c] = MINUS_INFINITE.value;
        }
    }
    int64_t longest = 0;
    for (int64_t i = 0; i < s->n_sentences; i++) longest = s->length[i] > longest ? s->length[i] : longest;
    return longest;
}
