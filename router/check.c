#include "router/check.h"

#include "engine/weights.h"

#include <stdlib.h>

// Elements of the model by who holds them.
typedef struct sizes {
    size_t attention; // matrices of every attention worker
    size_t vectors;   // norms and biases, kept in f32 by every attention worker
    size_t expert;    // one routed expert of one layer
} sizes;

static sizes count_elements(const model_config *model) {
    sizes result = {0};
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++) {
        model_tensor_spec spec;
        size_t n_layers, n_experts;
        model_tensor_describe(model, (model_tensor)which, 0, 0, &spec);
        model_tensor_counts(model, (model_tensor)which, &n_layers, &n_experts);
        if (n_layers == 0)
            continue;
        if (which == MODEL_EXPERT_GATE || which == MODEL_EXPERT_UP || which == MODEL_EXPERT_DOWN)
            result.expert += spec.dims[0] * spec.dims[1];
        else if (spec.n_dims == 1)
            result.vectors += spec.dims[0] * n_layers;
        else
            result.attention += spec.dims[0] * spec.dims[1] * n_layers;
    }
    return result;
}

static void print_count(FILE *out, const char *label, double value, const char *unit) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T"};
    int i = 0;
    for (; value >= 1000 && i < 4; i++)
        value /= 1000;
    fprintf(out, "%s%.*f %s%s", label, i ? (value < 10 ? 2 : 1) : 0, value, prefixes[i], unit);
}

static void print_sizes(const plan *p, bool colocated, FILE *out) {
    sizes s = count_elements(&p->model);
    double experts = (double)s.expert * (double)p->model.n_layers;
    double common = (double)s.attention + (double)s.vectors;
    double held = (double)((p->model.n_experts + p->n_ffn - 1) / p->n_ffn);
    size_t width = dtype_bytes(p->compute);
    double attention_bytes = (double)s.attention * (double)width + (double)s.vectors * 4;
    double ffn_bytes = experts * held * (double)width;
    print_count(out, "parameters:  ", common + experts * (double)p->model.n_experts, "");
    print_count(out, ", of which ", common + experts * (double)p->model.top_k,
                " work on a token\n");
    if (colocated) {
        print_count(out, "weights:     ", attention_bytes + ffn_bytes, "B");
        fprintf(out, " in each of %zu workers\n", p->n_attention);
    } else {
        print_count(out, "weights:     ", attention_bytes, "B");
        fprintf(out, " in each of %zu attention workers", p->n_attention);
        print_count(out, ", ", ffn_bytes, "B");
        fprintf(out, " in each of %zu FFN workers\n", p->n_ffn);
    }
    print_count(out, "KV cache:    ",
                (double)(2 * p->model.n_layers * p->model.n_kv_heads * p->model.head_dim * width),
                "B for a token\n");
}

int check_text(const config *c, const plan *p, tokenizer **t, chat_format **chat, error *err) {
    int rc = tokenizer_open(c->model, t, err);
    if (rc != E_OK)
        return rc;
    if (tokenizer_vocab_size(*t) > p->model.vocab)
        rc = error_set(err, E_INVALID,
                       "%s/tokenizer.json: has %zu ids, but the model's embedding has %zu rows; "
                       "take both from the same model",
                       c->model, tokenizer_vocab_size(*t), p->model.vocab);
    else
        rc = chat_format_open(c->model, c->chat.format, chat, err);
    if (rc != E_OK) {
        tokenizer_close(*t);
        *t = NULL;
    }
    return rc;
}

static int print_text(const config *c, const plan *p, FILE *out, error *err) {
    tokenizer *t = NULL;
    chat_format *chat = NULL;
    int rc = check_text(c, p, &t, &chat, err);
    if (rc == E_OK)
        fprintf(out, "text:        %zu token ids, chat format %s\n", tokenizer_vocab_size(t),
                chat_format_name(chat));
    chat_format_close(chat);
    tokenizer_close(t);
    return rc;
}

int check_bundle(const config *c, FILE *out, error *err) {
    plan *p = malloc(sizeof *p);
    weights *w = NULL;
    if (!p)
        return error_set(err, E_NO_MEMORY, "out of memory");
    int rc = plan_make(c, p, err);
    if (rc == E_OK)
        rc = weights_open(c->model, &w, err);
    if (rc == E_OK)
        rc = weights_check_model(w, &p->model, err);
    if (rc != E_OK)
        goto undo;
    fprintf(out, "model:       %s (%s), %s\n", c->model, model_arch_name(p->model.arch),
            c->served_model_name);
    fprintf(out, "types:       checkpoint %s, computed in %s, on the wire %s\n",
            dtype_name(p->model.checkpoint), dtype_name(p->compute), dtype_name(p->wire));
    fprintf(out, "layers:      %zu, with %zu experts, %zu of them for a token\n", p->model.n_layers,
            p->model.n_experts, p->model.top_k);
    print_sizes(p, c->mode == CONFIG_MODE_COLOCATED, out);
    fprintf(out, "context:     %zu tokens\n", p->max_tokens);
    rc = print_text(c, p, out, err);
undo:
    weights_close(w);
    free(p);
    return rc;
}
