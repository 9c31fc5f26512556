// Any bytes as a trace: requests in order and within their bounds, or an error line.
#include "engine/trace.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    trace t = {0};
    error err = {0};
    if (trace_parse("fuzz", (const char *)data, n, &t, &err) != E_OK) {
        if (!err.code || !err.text[0] || t.requests)
            abort();
        return 0;
    }
    if (t.n == 0 || t.requests[0].arrival != 0)
        abort();
    for (size_t i = 0; i < t.n; i++) {
        const trace_request *request = &t.requests[i];
        if (!isfinite(request->arrival) || request->prompt > TRACE_MAX_LENGTH ||
            request->output < 1 || request->output > TRACE_MAX_LENGTH ||
            (i && request->arrival < t.requests[i - 1].arrival))
            abort();
    }
    trace_free(&t);
    return 0;
}
