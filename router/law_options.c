#include "router/law_options.h"

int law_options_resolve(const law_options *options, ratio_law *out, error *err) {
    ratio_law law = {NAN, NAN, NAN, NAN, NAN, NAN};
    if (options->preset && ratio_law_preset(options->preset, &law, err) != E_OK)
        return error_prefix(err, "--preset");
#define X(field)                                                                                   \
    if (!isnan(options->coefficients.field))                                                       \
        law.field = options->coefficients.field;                                                   \
    if (isnan(law.field))                                                                          \
        return error_set(err, E_INVALID,                                                           \
                         "a law is missing: give --preset, or all of --alpha-a "                   \
                         "--beta-a --alpha-f --beta-f --alpha-c --beta-c");
    RATIO_LAW_MAP(X)
#undef X
    int rc = ratio_law_check(&law, err);
    if (rc == E_OK)
        *out = law;
    return rc;
}
