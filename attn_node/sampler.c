#include "attn_node/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    float weight; // adjusted logit, then unnormalised probability
    int32_t id;
} candidate;

struct sampler {
    size_t vocab;
    float *adjusted;       // (vocab)
    candidate *candidates; // (vocab)
    uint32_t *seen;        // (vocab) occurrences among the tokens of this row, zero between calls
};

int sampler_open(size_t vocab, sampler **out, error *err) {
    sampler *s = calloc(1, sizeof *s);
    if (s) {
        s->vocab = vocab;
        s->adjusted = calloc(vocab, sizeof *s->adjusted);
        s->candidates = calloc(vocab, sizeof *s->candidates);
        s->seen = calloc(vocab, sizeof *s->seen);
    }
    if (!s || !s->adjusted || !s->candidates || !s->seen) {
        sampler_close(s);
        return error_set(err, E_NO_MEMORY, "sampler: no memory for a vocabulary of %zu", vocab);
    }
    *out = s;
    return E_OK;
}

void sampler_close(sampler *s) {
    if (!s)
        return;
    free(s->adjusted);
    free(s->candidates);
    free(s->seen);
    free(s);
}

// A NaN logit never wins and never spreads: it counts as minus infinity.
static float clean(float logit) {
    return isnan(logit) ? -INFINITY : logit;
}

static int32_t argmax(const float *values, size_t n) {
    size_t best = 0;
    float best_value = clean(values[0]);
    for (size_t i = 1; i < n; i++) {
        if (values[i] > best_value) {
            best_value = values[i];
            best = i;
        }
    }
    return (int32_t)best;
}

static float log_sum_exp(const float *logits, size_t n) {
    float top = clean(logits[argmax(logits, n)]);
    if (!isfinite(top))
        return top;
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp((double)clean(logits[i]) - (double)top);
    return top + (float)log(sum);
}

static float finite_logprob(float value) {
    // JSON has no infinity; a token of probability 0 is reported as the OpenAI API does.
    return value > -9999.0f ? value : -9999.0f;
}

void sampler_score(sampler *s, const float *logits, int32_t id, int32_t n_top, token_event *event) {
    float norm = log_sum_exp(logits, s->vocab);
    event->logprob = finite_logprob(clean(logits[id]) - norm);
    event->n_top = n_top;
    int32_t n = 0;
    // Insertion into a list of at most 20: one pass over the vocabulary.
    for (size_t i = 0; i < s->vocab && n_top > 0; i++) {
        float value = clean(logits[i]);
        if (n == n_top && !(value > event->top[n - 1].logprob))
            continue;
        int32_t at = n < n_top ? n++ : n - 1;
        for (; at > 0 && value > event->top[at - 1].logprob; at--)
            event->top[at] = event->top[at - 1];
        event->top[at] = (token_logprob){.id = (int32_t)i, .logprob = value};
    }
    for (int32_t i = 0; i < n; i++)
        event->top[i].logprob = finite_logprob(event->top[i].logprob - norm);
    event->n_top = n_top < 0 ? -1 : n;
}

static void apply_penalties(sampler *s, const sampler_args *args) {
    const sampling_params *p = args->params;
    bool counted = p->presence_penalty != 0 || p->frequency_penalty != 0;
    bool repeated = p->repetition_penalty != 1;
    if (!counted && !repeated)
        return;
    // Repetition looks at prompt and output, presence and frequency at the output alone.
    for (size_t i = 0; i < args->n_tokens; i++) {
        int32_t id = args->tokens[i];
        if (repeated && !(s->seen[id] >> 31)) {
            s->seen[id] |= 1u << 31;
            float *logit = &s->adjusted[id];
            *logit = *logit > 0 ? *logit / p->repetition_penalty : *logit * p->repetition_penalty;
        }
        if (counted && i >= args->n_prompt)
            s->seen[id]++;
    }
    for (size_t i = 0; i < args->n_tokens; i++) {
        int32_t id = args->tokens[i];
        uint32_t count = s->seen[id] & 0x7fffffffu;
        s->seen[id] = 0;
        if (count)
            s->adjusted[id] -= p->presence_penalty + p->frequency_penalty * (float)count;
    }
}

static void adjust(sampler *s, const sampler_args *args) {
    const sampling_params *p = args->params;
    memcpy(s->adjusted, args->logits, s->vocab * sizeof *s->adjusted);
    for (int32_t i = 0; i < p->n_logit_bias; i++)
        s->adjusted[p->logit_bias[i].id] += p->logit_bias[i].bias;
    apply_penalties(s, args);
    if (args->n_generated < (size_t)p->min_tokens)
        for (int32_t i = 0; i < p->n_stop_ids; i++)
            s->adjusted[p->stop_ids[i]] = -INFINITY;
}

static int by_weight(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight < y->weight ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

// Moves the k best of n candidates to the front, in no order: a sort of a whole vocabulary would
// cost more than the model. No two compare equal, so that every partition is smaller than its
// range.
static void select_best(candidate *c, size_t n, size_t k) {
    size_t low = 0, high = n;
    while (high - low > 1) {
        candidate pivot = c[low + (high - low - 1) / 2];
        size_t i = low, j = high - 1;
        for (;; i++, j--) {
            while (by_weight(&c[i], &pivot) < 0)
                i++;
            while (by_weight(&c[j], &pivot) > 0)
                j--;
            if (i >= j)
                break;
            candidate swap = c[i];
            c[i] = c[j];
            c[j] = swap;
        }
        if (k <= j + 1)
            high = j + 1;
        else
            low = j + 1;
    }
}

// Splitmix64 of (seed, position): a stateless draw in [0, 1).
static double uniform_draw(uint64_t seed, uint64_t position) {
    uint64_t z = seed + (position + 1) * 0x9e3779b97f4a7c15ull;
    for (int round = 0; round < 2; round++) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

// Candidates with unnormalised probability under the temperature (that of the best is 1); without
// top_k, tokens too improbable to be in the nucleus or the min_p set are left out. Returns their
// number; *total is the mass that top_p is a share of.
static size_t collect(sampler *s, const sampling_params *p, double *total) {
    float top = clean(s->adjusted[argmax(s->adjusted, s->vocab)]);
    if (top == INFINITY) { // an infinite bias leaves only its own tokens
        for (size_t i = 0; i < s->vocab; i++)
            s->adjusted[i] = s->adjusted[i] == INFINITY ? 0 : -INFINITY;
        top = 0;
    }
    double sum = 0;
    for (size_t i = 0; i < s->vocab; i++) {
        float w = expf((clean(s->adjusted[i]) - top) / p->temperature);
        s->adjusted[i] = isfinite(w) ? w : 0;
        sum += (double)s->adjusted[i];
    }
    // Everything below the nucleus floor together weighs less than 1 - top_p.
    float nucleus = (float)((1.0 - (double)p->top_p) * sum / (double)s->vocab);
    float floor_weight = nucleus > p->min_p ? nucleus : p->min_p;
    if (p->top_k > 0)
        floor_weight = 0; // top_p is a share of what top_k leaves: all of that must be there
    size_t n = 0;
    *total = 0;
    for (size_t i = 0; i < s->vocab; i++) {
        if (s->adjusted[i] > 0 && s->adjusted[i] >= floor_weight) {
            s->candidates[n++] = (candidate){s->adjusted[i], (int32_t)i};
            *total += (double)s->adjusted[i];
        }
    }
    if (p->top_p < 1)
        *total = sum;
    return n;
}

static double weight_of(const candidate *c, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)c[i].weight;
    return sum;
}

// Cuts the candidates to top_k, then to the nucleus of what is left, then to min_p; descending.
static size_t truncate_list(candidate *c, size_t n, const sampling_params *p, double total) {
    enum { NUCLEUS_GUESS = 256, NUCLEUS_GROWTH = 8 };
    if (p->top_k > 0 && n > (size_t)p->top_k) {
        select_best(c, n, (size_t)p->top_k);
        n = (size_t)p->top_k;
        total = weight_of(c, n);
    }
    double share = (double)p->top_p * total, kept = 0;
    for (size_t k = NUCLEUS_GUESS; p->top_p < 1 && k < n; k *= NUCLEUS_GROWTH) {
        select_best(c, n, k);
        if (weight_of(c, k) >= share)
            n = k; // the nucleus is among these: fewer are to be sorted
    }
    qsort(c, n, sizeof *c, by_weight);
    if (p->top_p < 1) {
        size_t i = 0;
        while (i < n && kept < share)
            kept += (double)c[i++].weight;
        n = i ? i : 1;
    }
    while (n > 1 && c[n - 1].weight < p->min_p)
        n--;
    return n;
}

static int32_t draw(sampler *s, const sampling_params *p, size_t position) {
    double total;
    size_t n = collect(s, p, &total);
    if (n == 0)
        return argmax(s->adjusted, s->vocab);
    if (p->top_k > 0 || p->top_p < 1) {
        n = truncate_list(s->candidates, n, p, total);
        total = weight_of(s->candidates, n);
    }
    double left = uniform_draw(p->seed, position) * total;
    for (size_t i = 0; i + 1 < n; i++) {
        left -= (double)s->candidates[i].weight;
        if (left < 0)
            return s->candidates[i].id;
    }
    return s->candidates[n - 1].id;
}

void sampler_sample(sampler *s, const sampler_args *args, token_event *event) {
    const sampling_params *p = args->params;
    adjust(s, args);
    event->id = p->temperature > 0 ? draw(s, p, args->n_tokens) : argmax(s->adjusted, s->vocab);
    event->n_top = -1;
    event->logprob = 0;
    if (p->logprobs >= 0)
        sampler_score(s, args->logits, event->id, p->logprobs, event);
}
