/* One token on in a plain search: the step, the best continuations, and what becomes of the hypotheses. Included by
   native.c, and the fast twin of `turn` in search.py. Hypotheses that do not go on are passed over, and so are sentences
   that are over: a fifth of all rows. */

/* The logits of some groups again: 32 columns of one row each. */
void logits_of_groups(const model *m, const entry *x, const float *x_scale, const int64_t *row, const int64_t *group,
          int64_t n_looks, float *out) {
    const matrix *by = &m->output;
    for (int64_t i = 0; i < n_looks; i++) {
        int64_t first = group[i] * GROUP, n_own = by->n_out - first < GROUP ? by->n_out - first : GROUP;
        total whole[GROUP];
        matmul_group(x + row[i] * up(by->n_in, 64), by, first, whole);
        dequantise(whole, x_scale[row[i]], by, first, n_own, out + i * GROUP);
        for (int64_t c = n_own; c < GROUP; c++) out[i * GROUP + c] = LOWEST;
    }
}

/* All logits: rows x columns of the output. */
void all_logits(const model *m, const entry *x, const float *x_scale, int64_t n_rows, float *out) {
    const matrix *by = &m->output;
    total *whole = malloc(up(n_rows, 32) * BLOCK * sizeof(total));
    for (int64_t first = 0; first < by->n_out; first += BLOCK) {
        const int64_t n = by->n_out - first < BLOCK ? by->n_out - first : BLOCK;
        matmul(x, n_rows, by, first, n, whole);
        for (int64_t row = 0; row < n_rows; row++)
            dequantise(whole + row * up(n, 32), x_scale[row], by, first, n, out + row * by->n_out + first);
    }
    free(whole);
}

/* For each hypothesis the first cell that none of its sentence has in its past, which it alone sees from now on.
   Where the last of all that are seen ends; -1, and nothing changed, where there are too few. Hypotheses are those
   that `rows` lists, and only they have a past. */
static int64_t take_cells_of(const state *s, const int64_t *rows, int64_t n_rows) {
    const int64_t n_kept = s->n_kept, n_cells = s->n_cells;
    int64_t end = 0;
    for (int64_t first = 0, n; first < n_rows; first += n) {
        int64_t n_taken = 0;
        for (n = 1; first + n < n_rows && rows[first + n] / n_kept == rows[first] / n_kept;) n++;
        for (int64_t c = 0; c < n_cells; c++) {
            int is_seen = 0;
            for (int64_t i = first; i < first + n; i++) is_seen |= s->hidden[rows[i] * n_cells + c] == 0;
            if (!is_seen && n_taken < n) s->cell[rows[first + n_taken++]] = c, is_seen = 1;
            if (is_seen && c >= end) end = c + 1;
        }
        if (n_taken < n) return -1;
    }
    for (int64_t i = 0; i < n_rows; i++) s->hidden[rows[i] * n_cells + s->cell[rows[i]]] = 0;
    return end;
}

int64_t take_cells(float *hidden, int64_t n_sentences, int64_t n_kept, int64_t n_cells, int64_t *cell) {
    const int64_t n = n_sentences * n_kept;
    const state s = {.cell = cell, .hidden = hidden, .n_kept = n_kept, .n_cells = n_cells};
    int64_t *rows = malloc(n * sizeof(int64_t));
    for (int64_t row = 0; row < n; row++) rows[row] = row;
    int64_t end = take_cells_of(&s, rows, n);
    free(rows);
    return end;
}

/* The best continuations */

typedef struct {
    const float *penalty;         /* states of the rules' automaton x tokens: 0 where a token may follow */
    const int64_t *next;          /* states x tokens: the state after it */
    const float *length_penalty;  /* by which a hypothesis of so many tokens is divided */
    int64_t eos_id, min_length, n_best, stop_early;
} search_settings;

/* As `Beams` has them, in place. */
typedef struct {
    int64_t *number, *limit, *length, *n_ended, *token, *last, *state, *ended_token, *ended_length;
    float *margin, *log_prob, *ended_log_prob, *ended_score;
    int64_t n_tokens; /* that there is room for */
    uint8_t *is_over;
} hypotheses;

static inline int is_none(float x) { return x < LOWEST / 3; }

/* As it is rounded by itself: compilers may else divide by multiplying. */
static inline float over(float x, float y) { return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(x), _mm_set_ss(y))); }

#define NONE -1 /* where there is no token */

typedef struct { float value; int64_t parent, token; } candidate;

/* Among the best so far, the best first. Who comes later loses to an equal. */
static inline int64_t take_in(candidate *best, int64_t n, int64_t max_n, candidate new) {
    if (n == max_n && new.value <= best[n - 1].value) return n;
    int64_t i = n < max_n ? n : n - 1;
    for (; i > 0 && best[i - 1].value < new.value; i--) best[i] = best[i - 1];
    best[i] = new;
    return n < max_n ? n + 1 : n;
}

/* Those of one sentence, `rows` of what was step_output, looking only into groups that may hold one as good as `bound`. */
static int64_t best_in_groups(const model *m, const step_output *output, const hypotheses *b, const search_settings *h, int64_t sentence,
                        const int64_t *rows, int64_t first, int64_t n_rows, int64_t n_kept, float bound,
                        candidate *best) {
    const int64_t n_vocabulary = m->output.n_out, n_groups = up(n_vocabulary, GROUP) / GROUP;
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
                    n = take_in(best, n, n_kept + 1, (candidate){logit[token - g * GROUP] - log_sum + so_far,
                                                                 rows[i] - sentence * n_kept, token});
        }
    }
    return n;
}

/* The n_kept + 1 best of a sentence, the best first; how many there are. */
static int64_t choose(const model *m, const step_output *output, const hypotheses *b, const search_settings *h, int64_t sentence,
                      const int64_t *rows, int64_t first, int64_t n_rows, int64_t n_kept, candidate *best) {
    const int64_t n_groups = up(m->output.n_out, GROUP) / GROUP, max_n = n_kept + 1;
    /* The peaks: where all of them may be step_output, none that is wanted is lower than the last of as many. */
    int64_t n = 0;
    for (int64_t i = first; i < first + n_rows; i++)
        for (int64_t g = 0; g < n_groups; g++) {
            float highest = output->peak[i * n_groups + g] - output->log_sum[i] + b->log_prob[rows[i]];
            if (n < max_n || highest > best[n - 1].value) n = take_in(best, n, max_n, (candidate){highest, 0, 0});
        }
    float bound = n == max_n ? best[n - 1].value : LOWEST;
    bound -= 1e-4f * fabsf(bound); /* what is found again may be rounded to a little less than its peak */
    n = best_in_groups(m, output, b, h, sentence, rows, first, n_rows, n_kept, bound, best);
    /* Some may not be step_output, and what was not looked into may hold better ones than those that stand for them. */
    if (n < max_n || best[n - 1].value < bound) {
        bound = n < max_n ? LOWEST : best[n - 1].value - 1e-4f * fabsf(best[n - 1].value);
        n = best_in_groups(m, output, b, h, sentence, rows, first, n_rows, n_kept, bound, best);
    }
    return n;
}

/* What becomes of the hypotheses */

/* Rows of one sentence, each in the place of its parent. */
static void reorder_by_parent(void *rows, int64_t stride, int64_t n_bytes, const candidate *from, int64_t n_kept, char *room) {
    char *own = rows;
    for (int64_t k = 0; k < n_kept; k++) memcpy(room + k * n_bytes, own + k * stride, n_bytes);
    for (int64_t k = 0; k < n_kept; k++) memcpy(own + k * stride, room + from[k].parent * n_bytes, n_bytes);
}

static int is_over(const hypotheses *b, const search_settings *h, int64_t sentence, int64_t n_kept) {
    const float *score = b->ended_score + sentence * n_kept;
    float best = max_of(b->log_prob + sentence * n_kept, n_kept);
    if (is_none(best) || b->length[sentence] >= b->limit[sentence]) return 1;
    if (!h->stop_early) return 0;
    /* A log-probability only falls, and nothing is divided by more than at the limit. */
    float bound = over(best, h->length_penalty[b->limit[sentence]]);
    int64_t n_as_good = 0;
    for (int64_t k = 0; k < b->n_ended[sentence]; k++) n_as_good += score[k] >= bound;
    return n_as_good >= h->n_best;
}

static void advance(const state *s, const hypotheses *b, const search_settings *h, int64_t sentence, int64_t n_vocabulary,
                    const candidate *best, int64_t n, char *room) {
    const int64_t n_kept = s->n_kept, first = sentence * n_kept, n_open = n_kept - b->n_ended[sentence];
    const int64_t length = b->length[sentence] + 1, place = length - 1;
    if (n > n_open && n_open > 0) {
        float margin = best[n_open - 1].value - best[n_open].value;
        if (margin < b->margin[sentence]) b->margin[sentence] = margin;
    }
    reorder_by_parent(b->token + first * b->n_tokens, b->n_tokens * sizeof(int64_t), place * sizeof(int64_t), best, n_kept, room);
    /* All cells: of one that has ended there may be some past the end of those who go on. */
    reorder_by_parent(s->hidden + first * s->n_cells, s->n_cells * sizeof(float), s->n_cells * sizeof(float), best, n_kept, room);
    reorder_by_parent(b->state + first, sizeof(int64_t), sizeof(int64_t), best, n_kept, room);
    for (int64_t k = 0; k < n_kept; k++) {
        const int64_t row = first + k, token = best[k].token;
        int64_t *own = b->token + row * b->n_tokens;
        own[place] = b->last[row] = token;
        b->state[row] = h->next[b->state[row] * n_vocabulary + token];
        b->log_prob[row] = k < n && k < n_open ? best[k].value : MINUS_INFINITE.is;
        if (k >= n || k >= n_open || token != h->eos_id) continue;
        const int64_t slot = first + b->n_ended[sentence]++;
        memcpy(b->ended_token + slot * b->n_tokens, own, (place + 1) * sizeof(int64_t));
        b->ended_log_prob[slot] = best[k].value;
        b->ended_score[slot] = over(best[k].value, h->length_penalty[length]);
        b->ended_length[slot] = length;
        b->log_prob[row] = MINUS_INFINITE.is;
    }
    b->length[sentence] = length;
}

/* positions: positions x d_model. Returns -1, and changes nothing, if there are too few cells. */
int64_t turn(const model *m, state *s, const hypotheses *b, const search_settings *h, const float *positions) {
    const int64_t n_kept = s->n_kept, n_all = s->n_sentences * n_kept, n_x = m->d_model, n_cells = s->n_cells;
    int64_t *rows = calloc(n_all, sizeof(int64_t)), n_rows = 0;
    for (int64_t sentence = 0; sentence < s->n_sentences; sentence++) {
        b->is_over[sentence] = is_over(b, h, sentence, n_kept);
        for (int64_t row = sentence * n_kept; row < (sentence + 1) * n_kept; row++)
            if (!b->is_over[sentence] && !is_none(b->log_prob[row])) rows[n_rows++] = row;
    }
    s->end = take_cells_of(s, rows, n_rows);
    if (s->end < 0 || n_rows == 0) { free(rows); return s->end; }

    const int64_t n_groups = up(m->output.n_out, GROUP) / GROUP;
    step_output output = {calloc(up(n_rows, 32) * up(n_x, 64), sizeof(entry)), malloc(n_rows * sizeof(float)),
                 malloc(n_rows * n_groups * sizeof(float)), malloc(n_rows * sizeof(float))};
    float *x = malloc(n_rows * n_x * sizeof(float));
    for (int64_t i = 0; i < n_rows; i++)
        embed(m, m->target_embedding, b->last[rows[i]], positions + b->length[rows[i] / n_kept] * n_x, x + i * n_x);
    step_of(m, s, rows, n_rows, x, output);

    char *room = malloc(n_kept * ((1 + b->n_tokens) * sizeof(int64_t) + n_cells * sizeof(float)));
    candidate best[n_kept + 1];
    for (int64_t first = 0, n; first < n_rows; first += n) {
        const int64_t sentence = rows[first] / n_kept;
        for (n = 1; first + n < n_rows && rows[first + n] / n_kept == sentence;) n++;
        int64_t n_found = choose(m, &output, b, h, sentence, rows, first, n, n_kept, best);
        for (int64_t i = n_found; i <= n_kept; i++) best[i] = (candidate){LOWEST, 0, 0};
        advance(s, b, h, sentence, m->output.n_out, best, n_found, room);
        b->is_over[sentence] = is_over(b, h, sentence, n_kept);
        s->length[sentence]++;
    }
    free(room), free(x), free(rows);
    free(output.x), free(output.scale), free(output.peak), free(output.log_sum);
    return 0;
}

/* New sentences in the places of others; how long the longest of all is. */
int64_t enter(const model *m, const state *s, const hypotheses *b, const arrivals *a) {
    const int64_t n_kept = s->n_kept;
    encode(m, s, a);
    for (int64_t i = 0; i < a->n; i++) {
        const int64_t sentence = a->places[i];
        b->number[sentence] = a->number[i];
        b->limit[sentence] = a->limit[i];
        b->length[sentence] = b->n_ended[sentence] = s->length[sentence] = 0;
        b->margin[sentence] = INFINITE.is;
        for (int64_t row = sentence * n_kept; row < (sentence + 1) * n_kept; row++) {
            b->last[row] = a->bos_id;
            b->state[row] = b->ended_length[row] = 0;
            b->log_prob[row] = row == sentence * n_kept ? 0 : MINUS_INFINITE.is; /* all are alike before the first token */
            b->ended_log_prob[row] = b->ended_score[row] = MINUS_INFINITE.is;
            for (int64_t t = row * b->n_tokens; t < (row + 1) * b->n_tokens; t++) b->token[t] = b->ended_token[t] = NONE;
            for (int64_t c = row * s->n_cells; c < (row + 1) * s->n_cells; c++) s->hidden[c] = MINUS_INFINITE.is;
        }
    }
    int64_t longest = 0;
    for (int64_t i = 0; i < s->n_sentences; i++) longest = s->length[i] > longest ? s->length[i] : longest;
    return longest;
}
