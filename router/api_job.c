#include "router/api_internal.h"

#include "engine/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_choice(api_choice *choice) {
    detok_close(choice->detok);
    json_writer_free(&choice->held);
    json_writer_free(&choice->text);
    json_writer_free(&choice->tokens);
    json_writer_free(&choice->token_logprobs);
    json_writer_free(&choice->top_logprobs);
    json_writer_free(&choice->text_offsets);
}

static void end_choice(api_choice *choice, finish_reason finish) {
    choice->running = false;
    choice->finish = finish;
    choice->job->n_running--;
    choice->job->api->finished[finish]++;
}

// The only end of a job: cancels what still runs in the bundle.
static void close_job(api_job *job) {
    api *a = job->api;
    for (size_t i = 0; i < job->n_choices; i++) {
        api_choice *choice = &job->choices[i];
        if (choice->running) {
            bundle_cancel(a->bundle, choice->request);
            end_choice(choice, FINISH_ABORT);
        }
        free_choice(choice);
    }
    if (job->previous)
        job->previous->next = job->next;
    else
        a->jobs = job->next;
    if (job->next)
        job->next->previous = job->previous;
    a->n_jobs--;
    api_jobs_changed(a);
    api_params_free(&job->params);
    free(job->choices);
    free(job);
}

static void on_client_gone(void *user) {
    api_job *job = user;
    log_debug("api: %s: the client has gone (499)", job->id);
    job->api->client_gone++;
    close_job(job);
}

// ---- Streams ----
// A failed write needs no care here: on_client_gone follows.
static void send_stream(api_job *job, const char *text, size_t n) {
    if (!job->stream_begun) {
        http_stream_begin(job->http, 200, "text/event-stream; charset=utf-8",
                          "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
        job->api->responses[2]++;
        job->stream_begun = true;
    }
    http_stream_write(job->http, text, n);
    job->last_write_ms = uv_now(job->api->loop);
}

void api_job_keep_alive(api_job *job, uint64_t now_ms) {
    if (job->params.stream && now_ms - job->last_write_ms >= job->api->keep_alive_ms)
        send_stream(job, ":\n\n", 3);
}

// Before the first byte a failure has a status of its own; after it, it is an event.
static void fail_job(api_job *job, const api_error *e) {
    api *a = job->api;
    if (e->status == 500)
        log_warn("api: %s: %s", job->id, e->message);
    if (job->stream_begun) {
        json_writer_clear(&a->scratch);
        json_put(&a->scratch, "data: ");
        api_error_body(e, &a->scratch);
        json_put(&a->scratch, "\n\ndata: [DONE]\n\n");
        send_stream(job, a->scratch.text, a->scratch.n);
        http_stream_end(job->http);
    } else {
        api_respond_error(a, job->http, e);
    }
    close_job(job);
}

static void fail_no_memory(api_job *job) {
    api_error e;
    api_error_set(&e, 500, NULL, NULL, "out of memory");
    fail_job(job, &e);
}

void api_job_stop(api_job *job) {
    api_error e;
    api_error_set(&e, 503, "draining", NULL, "this server is shutting down");
    fail_job(job, &e);
}

static void finish_job(api_job *job) {
    api *a = job->api;
    json_writer_clear(&a->scratch);
    if (job->params.stream) {
        if (job->params.include_usage)
            api_output_usage_chunk(job, &a->scratch);
        json_put(&a->scratch, "data: [DONE]\n\n");
    } else {
        api_output_response(job, &a->scratch);
    }
    if (a->scratch.failed) {
        fail_no_memory(job);
        return;
    }
    if (job->params.stream) {
        send_stream(job, a->scratch.text, a->scratch.n);
        http_stream_end(job->http);
    } else {
        api_respond(a, job->http, 200, NULL, &a->scratch);
    }
    close_job(job);
}

// ---- Tokens ----
// Moves a piece of text on; true when it completes a stop string.
static bool take_piece(api_choice *choice, const char *piece, size_t n) {
    const api_params *params = &choice->job->params;
    if (choice->n_generated <= params->sampling.min_tokens) {
        json_put_n(&choice->text, piece, n);
        return false;
    }
    return stop_push(&params->stops, &choice->held, piece, n, &choice->text);
}

// Takes the text of a token and, at the end, what was held back. Sets *stopped when a stop string
// was found; E_* when the text cannot be made.
static int take_text(api_choice *choice, const token_event *event, bool *stopped) {
    const char *piece;
    size_t n;
    int rc = E_OK;
    // The text of an id that ended the request is no part of the output.
    if (!event->is_prompt && event->finish != FINISH_STOP && event->id >= 0) {
        rc = detok_push(choice->detok, event->id, &piece, &n);
        if (rc == E_OK)
            *stopped = take_piece(choice, piece, n);
    }
    if (rc != E_OK || *stopped || event->finish == FINISH_NONE)
        return rc;
    rc = detok_flush(choice->detok, &piece, &n);
    if (rc == E_OK)
        *stopped = take_piece(choice, piece, n);
    if (rc == E_OK && !*stopped)
        stop_flush(&choice->held, &choice->text);
    return rc;
}

static bool choice_failed(const api_choice *choice) {
    return choice->text.failed || choice->held.failed || choice->tokens.failed ||
           choice->token_logprobs.failed || choice->top_logprobs.failed ||
           choice->text_offsets.failed;
}

static void clear_sent(api_choice *choice) {
    json_writer_clear(&choice->text);
    json_writer_clear(&choice->tokens);
    json_writer_clear(&choice->token_logprobs);
    json_writer_clear(&choice->top_logprobs);
    json_writer_clear(&choice->text_offsets);
    choice->n_logprobs = 0;
    choice->sent = true;
}

// False: out of memory.
static bool send_chunk(api_choice *choice) {
    api *a = choice->job->api;
    json_writer_clear(&a->scratch);
    api_output_chunk(choice, &a->scratch);
    if (a->scratch.failed)
        return false;
    send_stream(choice->job, a->scratch.text, a->scratch.n);
    clear_sent(choice);
    return true;
}

static void on_token(void *user, const token_event *event) {
    api_choice *choice = user;
    api_job *job = choice->job;
    if (event->finish == FINISH_ERROR) {
        api_error e;
        end_choice(choice, FINISH_ERROR);
        api_error_set(&e, 500, NULL, NULL, "the generation failed");
        fail_job(job, &e);
        return;
    }
    bool stopped = false, counts = !event->is_prompt && event->id >= 0;
    choice->n_generated += counts;
    if (job->params.sampling.logprobs >= 0 && event->id >= 0)
        api_output_token(choice, event);
    int rc = take_text(choice, event, &stopped);
    if (event->finish != FINISH_NONE) {
        end_choice(choice, stopped ? FINISH_STOP : event->finish);
    } else if (stopped) {
        bundle_cancel(job->api->bundle, choice->request);
        end_choice(choice, FINISH_STOP);
    }
    if (rc != E_OK || choice_failed(choice)) {
        fail_no_memory(job);
        return;
    }
    bool has_words = counts && (choice->text.n || choice->n_logprobs);
    if (job->params.stream && (has_words || !choice->running) && !send_chunk(choice)) {
        fail_no_memory(job);
        return;
    }
    if (job->n_running == 0)
        finish_job(job);
}

static void on_error(void *user, int code, const char *message) {
    api_choice *choice = user;
    api_error e;
    end_choice(choice, FINISH_ERROR);
    api_error_from_bundle(&e, code, message);
    fail_job(choice->job, &e);
}

// ---- Starting ----
// Sets up every choice: prompts in order, each n times.
static int open_choices(api_job *job, const api_prompts *prompts) {
    size_t n_each = (size_t)job->params.n;
    job->choices = calloc(prompts->n * n_each, sizeof *job->choices);
    if (!job->choices)
        return E_NO_MEMORY;
    job->n_choices = prompts->n * n_each;
    for (size_t i = 0; i < job->n_choices; i++) {
        api_choice *choice = &job->choices[i];
        const api_prompt *prompt = &prompts->list[i / n_each];
        choice->job = job;
        choice->index = i;
        choice->n_prompt = prompt->ids.n;
        if (i % n_each == 0)
            job->n_prompt_tokens += prompt->ids.n;
        if (job->params.echo)
            json_put_n(&choice->text, prompt->text, prompt->n_text);
        int rc = detok_open(job->api->tokenizer, !job->params.keep_special, &choice->detok);
        if (rc != E_OK)
            return rc;
    }
    return E_OK;
}

static uint64_t choose_seed(const api_params *params) {
    uint64_t seed = (uint64_t)params->seed;
    if (!params->has_seed)
        uv_random(NULL, NULL, &seed, sizeof seed, 0, NULL);
    return seed;
}

static int submit_choices(api_job *job, const api_prompts *prompts, api_error *e) {
    size_t n_each = (size_t)job->params.n;
    uint64_t seed = choose_seed(&job->params);
    for (size_t i = 0; i < job->n_choices; i++) {
        api_choice *choice = &job->choices[i];
        const token_ids *ids = &prompts->list[i / n_each].ids;
        sampling_params sampling = job->params.sampling;
        sampling.seed = seed + i % n_each;
        bundle_submit_args args = {ids->ids, ids->n, &sampling, choice, on_token, on_error};
        error err = {0};
        int rc = bundle_submit(job->api->bundle, &args, &choice->request, &err);
        if (rc != E_OK)
            return api_error_from_bundle(e, rc, err.text);
        choice->running = true;
        job->n_running++;
    }
    return 0;
}

// Echo without generation and without logprobs needs nothing from the bundle.
static void finish_echo(api_job *job) {
    for (size_t i = 0; i < job->n_choices; i++) {
        job->n_running++;
        end_choice(&job->choices[i], FINISH_LENGTH);
        if (job->params.stream && !send_chunk(&job->choices[i])) {
            fail_no_memory(job);
            return;
        }
    }
    finish_job(job);
}

static api_job *open_job(api *a, http_request *request, api_params *params) {
    api_job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->api = a;
    job->http = request;
    job->params = *params;
    params->stops.n = 0;
    job->params.sampling.logit_bias = job->params.bias;
    job->created = time(NULL);
    job->last_write_ms = uv_now(a->loop);
    api_make_id(job->params.chat ? "chatcmpl-" : "cmpl-", job->id);
    job->next = a->jobs;
    if (a->jobs)
        a->jobs->previous = job;
    a->jobs = job;
    a->n_jobs++;
    api_jobs_changed(a);
    http_request_drop_body(request);
    http_request_watch(request, on_client_gone, job);
    return job;
}

void api_job_start(api *a, http_request *request, api_params *params, api_prompts *prompts) {
    api_error e;
    api_job *job = open_job(a, request, params);
    if (!job) {
        api_error_set(&e, 500, NULL, NULL, "out of memory");
        api_respond_error(a, request, &e);
        return;
    }
    if (open_choices(job, prompts) != E_OK)
        fail_no_memory(job);
    else if (job->params.sampling.max_tokens == 0 && !job->params.sampling.prompt_logprobs)
        finish_echo(job);
    else if (submit_choices(job, prompts, &e) != 0)
        fail_job(job, &e);
}
