#include "attn_node/sched.h"

#include "attn_node/pages.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct seq_list {
    sequence *head; // ascending order of arrival
    size_t n;
} seq_list;

struct sched {
    sched_args args;
    pages *pages;
    seq_list waiting;
    seq_list *running; // (n_lanes)
    // Order of the oldest running sequence that lacks pages: what becomes free is kept from younger
    // ones until it has them, or two lanes could take the same pages from each other for ever.
    uint64_t claim; // NO_CLAIM: none
    uint64_t n_submitted, n_preempted;
};

#define NO_CLAIM UINT64_MAX

static size_t pages_for(size_t tokens) {
    return (tokens + KERNEL_PAGE_TOKENS - 1) / KERNEL_PAGE_TOKENS;
}

// ---- lists in order of arrival ----

static void list_insert(seq_list *list, sequence *seq) {
    sequence **at = &list->head;
    while (*at && (*at)->order < seq->order)
        at = &(*at)->next;
    seq->next = *at;
    *at = seq;
    list->n++;
}

static void list_remove(seq_list *list, sequence *seq) {
    for (sequence **at = &list->head; *at; at = &(*at)->next) {
        if (*at == seq) {
            *at = seq->next;
            seq->next = NULL;
            list->n--;
            return;
        }
    }
    assert(!"sequence is in its list");
}

static sequence *list_find(const seq_list *list, uint64_t request) {
    for (sequence *seq = list->head; seq; seq = seq->next)
        if (seq->request == request)
            return seq;
    return NULL;
}

static void sequence_free(sequence *seq) {
    if (!seq)
        return;
    free(seq->tokens);
    free(seq->pages);
    free(seq->bias);
    free(seq);
}

static void list_free(seq_list *list) {
    while (list->head) {
        sequence *seq = list->head;
        list->head = seq->next;
        sequence_free(seq);
    }
}

// ---- open, close ----

int sched_open(const sched_args *args, sched **out, error *err) {
    sched *s = calloc(1, sizeof *s);
    if (s)
        s->running = calloc(args->n_lanes, sizeof *s->running);
    if (!s || !s->running) {
        sched_close(s);
        return error_set(err, E_NO_MEMORY, "scheduler: out of memory");
    }
    s->args = *args;
    s->claim = NO_CLAIM;
    int code = pages_open(args->n_pages, &s->pages, err);
    if (code) {
        sched_close(s);
        return code;
    }
    *out = s;
    return E_OK;
}

void sched_close(sched *s) {
    if (!s)
        return;
    list_free(&s->waiting);
    for (size_t i = 0; s->running && i < s->args.n_lanes; i++)
        list_free(&s->running[i]);
    pages_close(s->pages);
    free(s->running);
    free(s);
}

int step_plan_init(step_plan *plan, const sched_args *args, error *err) {
    *plan = (step_plan){
        .ids = calloc(args->token_budget, sizeof *plan->ids),
        .positions = calloc(args->token_budget, sizeof *plan->positions),
        .kv_slot = calloc(args->token_budget, sizeof *plan->kv_slot),
        .parts = calloc(args->max_sequences, sizeof *plan->parts),
        .sequences = calloc(args->max_sequences, sizeof *plan->sequences),
    };
    if (plan->ids && plan->positions && plan->kv_slot && plan->parts && plan->sequences)
        return E_OK;
    step_plan_free(plan);
    return error_set(err, E_NO_MEMORY, "scheduler: out of memory");
}

void step_plan_free(step_plan *plan) {
    free(plan->ids);
    free(plan->positions);
    free(plan->kv_slot);
    free(plan->parts);
    free(plan->sequences);
    *plan = (step_plan){0};
}

// ---- submit, cancel, end ----

static int check_submit(const sched *s, size_t n_prompt, const sampling_params *params,
                        error *err) {
    size_t most = n_prompt + (size_t)params->max_tokens;
    if (most > s->args.max_tokens)
        return error_set(err, E_TOO_LARGE,
                         "%zu prompt tokens and max_tokens %d exceed the context of %zu tokens",
                         n_prompt, params->max_tokens, s->args.max_tokens);
    if (pages_for(most) > pages_total(s->pages))
        return error_set(err, E_TOO_LARGE,
                         "%zu prompt tokens and max_tokens %d exceed the KV cache of %zu tokens; "
                         "raise attention.kv_tokens",
                         n_prompt, params->max_tokens, s->args.n_pages * KERNEL_PAGE_TOKENS);
    return E_OK;
}

int sched_submit(sched *s, uint64_t request, const int32_t *prompt, size_t n_prompt,
                 const sampling_params *params, error *err) {
    int code = check_submit(s, n_prompt, params, err);
    if (code)
        return code;
    size_t most = n_prompt + (size_t)params->max_tokens;
    size_t n_bias = (size_t)params->n_logit_bias;
    sequence *seq = calloc(1, sizeof *seq);
    if (seq) {
        seq->tokens = malloc(most * sizeof *seq->tokens);
        seq->pages = malloc(pages_for(most) * sizeof *seq->pages);
        seq->bias = malloc((n_bias ? n_bias : 1) * sizeof *seq->bias);
    }
    if (!seq || !seq->tokens || !seq->pages || !seq->bias) {
        sequence_free(seq);
        return error_set(err, E_NO_MEMORY, "no memory for a request of %zu tokens", most);
    }
    seq->request = request;
    seq->order = s->n_submitted++;
    seq->params = *params;
    if (n_bias)
        memcpy(seq->bias, params->logit_bias, n_bias * sizeof *seq->bias);
    seq->params.logit_bias = seq->bias;
    memcpy(seq->tokens, prompt, n_prompt * sizeof *seq->tokens);
    seq->n_tokens = seq->n_prompt = n_prompt;
    seq->lane = -1;
    list_insert(&s->waiting, seq);
    return E_OK;
}

static void drop_claim(sched *s, const sequence *seq) {
    if (s->claim == seq->order)
        s->claim = NO_CLAIM;
}

static void give_pages(sched *s, sequence *seq) {
    drop_claim(s, seq);
    pages_give(s->pages, seq->pages, seq->n_pages);
    seq->n_pages = 0;
    seq->n_computed = 0;
}

static void finish(sched *s, sequence *seq) {
    assert(!seq->in_step);
    give_pages(s, seq);
    list_remove(seq->lane < 0 ? &s->waiting : &s->running[seq->lane], seq);
    sequence_free(seq);
}

void sched_cancel(sched *s, uint64_t request) {
    sequence *seq = list_find(&s->waiting, request);
    for (size_t i = 0; !seq && i < s->args.n_lanes; i++)
        seq = list_find(&s->running[i], request);
    if (!seq)
        return;
    if (seq->in_step)
        seq->cancelled = true;
    else
        finish(s, seq);
}

// ---- pages and preemption ----

static void preempt(sched *s, sequence *seq) {
    give_pages(s, seq);
    list_remove(&s->running[seq->lane], seq);
    seq->lane = -1;
    seq->evict = false;
    s->n_preempted++;
    list_insert(&s->waiting, seq);
}

// The youngest sequence that holds pages, or NULL; *pending: one is already marked to give way.
static sequence *youngest_running(const sched *s, bool *pending) {
    sequence *youngest = NULL;
    *pending = false;
    for (size_t i = 0; i < s->args.n_lanes; i++) {
        for (sequence *seq = s->running[i].head; seq; seq = seq->next) {
            *pending |= seq->evict;
            if (seq->n_pages && (!youngest || seq->order > youngest->order))
                youngest = seq;
        }
    }
    return youngest;
}

// Takes pages for the first n_tokens of seq as far as there are some. Younger sequences give way:
// at once, or, when they are in a step, at the end of it (seq then has no row this time).
static bool take_pages(sched *s, sequence *seq, size_t n_tokens) {
    size_t needed = pages_for(n_tokens);
    while (seq->n_pages < needed) {
        if (seq->order > s->claim)
            return false;
        int32_t page = pages_take(s->pages);
        if (page >= 0) {
            seq->pages[seq->n_pages++] = page;
            continue;
        }
        bool pending;
        sequence *victim = youngest_running(s, &pending);
        if (pending || !victim || victim->order <= seq->order)
            return false;
        if (victim->in_step) {
            victim->evict = true;
            return false;
        }
        preempt(s, victim);
    }
    return true;
}

static bool reserve(sched *s, sequence *seq, size_t n_tokens) {
    bool taken = take_pages(s, seq, n_tokens);
    if (taken)
        drop_claim(s, seq);
    else if (seq->order < s->claim)
        s->claim = seq->order;
    return taken;
}

// ---- planning ----

static void add_rows(step_plan *plan, sequence *seq, size_t n_rows) {
    size_t first = seq->n_computed;
    for (size_t i = 0; i < n_rows; i++) {
        size_t token = first + i, row = plan->n_rows + i;
        plan->ids[row] = seq->tokens[token];
        plan->positions[row] = (int32_t)token;
        plan->kv_slot[row] = seq->pages[token / KERNEL_PAGE_TOKENS] * KERNEL_PAGE_TOKENS +
                             (int32_t)(token % KERNEL_PAGE_TOKENS);
    }
    plan->parts[plan->n_parts] = (step_part){seq, plan->n_rows, n_rows, first, false};
    plan->sequences[plan->n_parts++] = (kernel_sequence){
        .q_row0 = (int32_t)plan->n_rows,
        .q_rows = (int32_t)n_rows,
        .kv_tokens = (int32_t)(first + n_rows),
        .pages = seq->pages,
    };
    plan->n_rows += n_rows;
    seq->in_step = true;
}

static bool is_decode(const sequence *seq) {
    return seq->n_computed + 1 == seq->n_tokens;
}

// One decode row for each sequence past its prompt. A list walk that preemption may shorten: only
// younger sequences, which come later in the list, can be taken out.
static void plan_decode(sched *s, int lane, step_plan *plan) {
    for (sequence *seq = s->running[lane].head; seq; seq = seq->next)
        if (is_decode(seq) && plan->n_rows < s->args.token_budget && reserve(s, seq, seq->n_tokens))
            add_rows(plan, seq, 1);
}

static void plan_prefill(sched *s, int lane, step_plan *plan) {
    for (sequence *seq = s->running[lane].head; seq; seq = seq->next) {
        size_t left = s->args.token_budget - plan->n_rows;
        if (!left)
            return;
        if (is_decode(seq) || seq->in_step)
            continue;
        size_t chunk = seq->n_tokens - seq->n_computed;
        chunk = chunk < left ? chunk : left;
        if (reserve(s, seq, seq->n_computed + chunk))
            add_rows(plan, seq, chunk);
    }
}

static size_t lane_load(const sched *s, size_t lane) {
    size_t load = 0;
    for (const sequence *seq = s->running[lane].head; seq; seq = seq->next)
        load += seq->n_tokens + KERNEL_PAGE_TOKENS; // a sequence costs a row beside its KV tokens
    return load;
}

// Rows of the lane's next step: one for each sequence, and the prompts that are still to come.
static size_t lane_rows(const sched *s, size_t lane) {
    size_t rows = 0;
    for (const sequence *seq = s->running[lane].head; seq; seq = seq->next)
        rows += seq->n_tokens - seq->n_computed;
    return rows;
}

// The lane in use with the least load; an unused one when there is no other, or when that lane has
// enough rows. A lane more hides the time that frames are away, but every lane reads all weights:
// it pays only when each has work enough.
static size_t choose_lane(const sched *s) {
    size_t n = s->args.n_lanes, used = n, unused = n;
    for (size_t i = 0; i < n; i++) {
        if (!s->running[i].n)
            unused = unused < n ? unused : i;
        else if (used == n || lane_load(s, i) < lane_load(s, used))
            used = i;
    }
    if (unused < n && (used == n || lane_rows(s, used) >= s->args.lane_rows))
        return unused;
    return used;
}

static size_t count_running(const sched *s) {
    size_t n = 0;
    for (size_t i = 0; i < s->args.n_lanes; i++)
        n += s->running[i].n;
    return n;
}

// Waiting sequences, oldest first, into lanes while slots and pages last.
static void admit(sched *s) {
    while (s->waiting.head && count_running(s) < s->args.max_sequences) {
        sequence *seq = s->waiting.head;
        size_t first_chunk = seq->n_tokens;
        if (first_chunk > s->args.token_budget)
            first_chunk = s->args.token_budget;
        if (seq->order > s->claim || pages_for(first_chunk) > pages_free_count(s->pages))
            return;
        size_t best = choose_lane(s);
        list_remove(&s->waiting, seq);
        seq->lane = (int)best;
        list_insert(&s->running[best], seq);
    }
}

void sched_plan(sched *s, int lane, step_plan *plan) {
    plan->n_rows = plan->n_parts = 0;
    admit(s);
    plan_decode(s, lane, plan);
    plan_prefill(s, lane, plan);
}

void sched_step_done(sched *s, step_plan *plan) {
    for (size_t i = 0; i < plan->n_parts; i++) {
        sequence *seq = plan->parts[i].seq;
        seq->in_step = false;
        seq->n_computed += plan->parts[i].n_rows;
        if (seq->cancelled || plan->parts[i].ended)
            finish(s, seq);
        else if (seq->evict)
            preempt(s, seq);
    }
    plan->n_parts = plan->n_rows = 0;
}

void sched_append(sequence *seq, int32_t token) {
    assert(seq->n_tokens < seq->n_prompt + (size_t)seq->params.max_tokens);
    seq->tokens[seq->n_tokens++] = token;
}

sched_stats sched_stats_get(const sched *s) {
    size_t used = pages_total(s->pages) - pages_free_count(s->pages);
    return (sched_stats){
        .running = count_running(s),
        .waiting = s->waiting.n,
        .kv_tokens = used * KERNEL_PAGE_TOKENS,
        .preemptions = s->n_preempted,
    };
}
