// rows.c: operations that walk rows once: norm, dispatch, combine, convert, zero.
#include "kernels/cpu/cpu.h"

#include "engine/frame.h"

typedef struct norm_job {
    cpu_backend *cpu;
    const kernel_norm_args *args;
} norm_job;

static void norm_part(void *user, int part, int n_parts) {
    const norm_job *job = user;
    const kernel_norm_args *args = job->args;
    size_t begin, end, act = dtype_bytes(job->cpu->base.compute);
    pool_range(args->rows, part, n_parts, &begin, &end);
    for (size_t r = begin; r < end; r++) {
        size_t row = args->select ? (size_t)args->select[r] : r;
        job->cpu->isa.norm((const float *)cpu_address(args->x) + row * args->hidden,
                           cpu_address(args->weight), args->hidden, args->epsilon,
                           (uint8_t *)cpu_address(args->out) + r * args->hidden * act);
    }
}

int cpu_norm(kernel_queue *queue, const kernel_norm_args *args) {
    norm_job job = {cpu_of(queue), args};
    cpu_run(job.cpu, args->rows * args->hidden * sizeof(float), norm_part, &job);
    return 0;
}

// n elements from one type into f32 or bf16.
static void convert(const cpu_isa *isa, const void *in, dtype in_type, void *out, dtype out_type,
                    size_t n) {
    if (in_type == out_type) {
        memmove(out, in, n * dtype_bytes(in_type));
    } else if (in_type == DTYPE_F32) {
        isa->to_bf16(in, out, n);
    } else if (in_type == DTYPE_BF16) {
        isa->from_bf16(in, out, n);
    } else {
        const uint16_t *half = in;
        for (size_t i = 0; i < n; i++) {
            float value = f16_to_f32(half[i]);
            if (out_type == DTYPE_F32)
                ((float *)out)[i] = value;
            else
                ((uint16_t *)out)[i] = f32_to_bf16(value);
        }
    }
}

typedef struct dispatch_job {
    cpu_backend *cpu;
    const kernel_dispatch_args *args;
    frame_layout layout[KERNEL_MAX_RANKS];
} dispatch_job;

static int rank_of(const kernel_dispatch_args *args, uint16_t expert) {
    return expert == FRAME_NO_EXPERT ? -1 : args->expert_rank[expert];
}

// Which rows go to which rank, in ascending order.
static int select_rows(const kernel_dispatch_args *args) {
    const uint16_t *experts = cpu_address(args->experts);
    memset(args->frame_rows, 0, args->n_ranks * sizeof *args->frame_rows);
    for (size_t row = 0; row < args->rows; row++)
        for (size_t i = 0; i < args->top_k; i++) {
            int rank = rank_of(args, experts[row * args->top_k + i]);
            if (rank < 0)
                continue;
            if ((size_t)rank >= args->n_ranks)
                return E_INVALID;
            int32_t n = args->frame_rows[rank];
            int32_t *list = args->row_index + (size_t)rank * args->rows;
            if (n && list[n - 1] == (int32_t)row)
                continue;
            list[n] = (int32_t)row;
            args->frame_rows[rank] = n + 1;
        }
    return 0;
}

static void write_entries(const dispatch_job *job, size_t rank) {
    const kernel_dispatch_args *args = job->args;
    const frame_layout *layout = &job->layout[rank];
    const uint16_t *experts = cpu_address(args->experts);
    const float *weights = cpu_address(args->weights);
    uint8_t *payload = cpu_address(args->payload[rank]);
    uint16_t *to_experts = (uint16_t *)(void *)(payload + layout->experts_at);
    float *to_weights = (float *)(void *)(payload + layout->weights_at);
    size_t n = (size_t)args->frame_rows[rank];
    memset(payload, 0, layout->rows_at); // the gaps between the sections too
    for (size_t f = 0; f < n; f++) {
        size_t row = (size_t)args->row_index[rank * args->rows + f];
        for (size_t i = 0; i < args->top_k; i++) {
            uint16_t expert = experts[row * args->top_k + i];
            bool ours = rank_of(args, expert) == (int)rank;
            to_experts[f * args->top_k + i] = ours ? expert : FRAME_NO_EXPERT;
            to_weights[f * args->top_k + i] = ours ? weights[row * args->top_k + i] : 0.0f;
        }
    }
}

static void dispatch_part(void *user, int part, int n_parts) {
    const dispatch_job *job = user;
    const kernel_dispatch_args *args = job->args;
    dtype compute = job->cpu->base.compute;
    for (size_t rank = 0; rank < args->n_ranks; rank++) {
        uint8_t *to = (uint8_t *)cpu_address(args->payload[rank]) + job->layout[rank].rows_at;
        size_t begin, end;
        pool_range((size_t)args->frame_rows[rank], part, n_parts, &begin, &end);
        for (size_t f = begin; f < end; f++) {
            size_t row = (size_t)args->row_index[rank * args->rows + f];
            convert(
                &job->cpu->isa,
                (const uint8_t *)cpu_address(args->h) + row * args->hidden * dtype_bytes(compute),
                compute, to + f * args->hidden * dtype_bytes(args->wire), args->wire, args->hidden);
        }
    }
}

int cpu_dispatch(kernel_queue *queue, const kernel_dispatch_args *args) {
    dispatch_job job = {.cpu = cpu_of(queue), .args = args};
    int rc = select_rows(args);
    size_t rows = 0;
    for (size_t rank = 0; !rc && rank < args->n_ranks; rank++) {
        size_t n = (size_t)args->frame_rows[rank];
        rc = frame_layout_make(FRAME_DISPATCH, n, args->top_k, args->hidden, args->wire,
                               &job.layout[rank]);
        if (!rc)
            write_entries(&job, rank);
        rows += n;
    }
    if (!rc)
        cpu_run(job.cpu, rows * args->hidden * sizeof(float), dispatch_part, &job);
    return rc;
}

typedef struct combine_job {
    cpu_backend *cpu;
    const kernel_combine_args *args;
} combine_job;

// Threads divide the columns, so that the ranks of a row are added in order.
static void combine_part(void *user, int part, int n_parts) {
    const combine_job *job = user;
    const kernel_combine_args *args = job->args;
    size_t begin, end;
    pool_range(round_up(args->hidden, CPU_VECTOR) / CPU_VECTOR, part, n_parts, &begin, &end);
    begin *= CPU_VECTOR;
    end = end * CPU_VECTOR < args->hidden ? end * CPU_VECTOR : args->hidden;
    for (size_t rank = 0; rank < args->n_ranks; rank++)
        for (size_t f = 0; f < (size_t)args->frame_rows[rank]; f++) {
            size_t row = (size_t)args->row_index[rank * args->row_stride + f];
            float *x = (float *)cpu_address(args->x) + row * args->hidden + begin;
            size_t at = f * args->hidden + begin;
            if (args->wire == DTYPE_F32)
                job->cpu->isa.add_scaled(x, (const float *)args->payload[rank] + at, 1.0f,
                                         end - begin);
            else
                job->cpu->isa.add_bf16(x, (const uint16_t *)args->payload[rank] + at, end - begin);
        }
}

int cpu_combine(kernel_queue *queue, const kernel_combine_args *args) {
    combine_job job = {cpu_of(queue), args};
    size_t rows = 0;
    for (size_t rank = 0; rank < args->n_ranks; rank++)
        rows += (size_t)args->frame_rows[rank];
    cpu_run(job.cpu, rows * args->hidden * sizeof(float), combine_part, &job);
    return 0;
}

typedef struct convert_job {
    cpu_backend *cpu;
    const kernel_convert_args *args;
} convert_job;

static void convert_part(void *user, int part, int n_parts) {
    const convert_job *job = user;
    const kernel_convert_args *args = job->args;
    const uint8_t *in = args->host_in ? args->host_in : cpu_address(args->in);
    uint8_t *out = args->host_out ? args->host_out : cpu_address(args->out);
    size_t begin, end;
    pool_range(args->rows, part, n_parts, &begin, &end);
    convert(&job->cpu->isa, in + begin * args->columns * dtype_bytes(args->in_type), args->in_type,
            out + begin * args->columns * dtype_bytes(args->out_type), args->out_type,
            (end - begin) * args->columns);
}

int cpu_convert(kernel_queue *queue, const kernel_convert_args *args) {
    convert_job job = {cpu_of(queue), args};
    cpu_run(job.cpu, args->rows * args->columns * sizeof(float), convert_part, &job);
    return 0;
}

int cpu_zero(kernel_queue *queue, kernel_ref ref, size_t bytes) {
    (void)queue;
    memset(cpu_address(ref), 0, bytes);
    return 0;
}
