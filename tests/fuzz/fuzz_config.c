// Any text is either refused with one line or gives a config that survives the round trip.
#include "engine/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    config c, back;
    error err = {0};
    if (config_parse_json("fuzz", (const char *)data, n_bytes, &c, &err) != E_OK) {
        if (!err.text[0] || strchr(err.text, '\n'))
            abort();
        return 0;
    }
    char *text = config_to_json(&c);
    if (!text || config_parse_json("back", text, strlen(text), &back, &err) != E_OK)
        abort();
    char *again = config_to_json(&back);
    if (!again || strcmp(text, again) != 0)
        abort();
    free(text);
    free(again);
    return 0;
}
