// random.h: a small generator for simulations, the same numbers on every machine.
//
// splitmix64 by Steele, Lea and Flood; any state is a good one to begin with. Thread: the state's
// owner.
#ifndef TANDEM_ENGINE_RANDOM_H
#define TANDEM_ENGINE_RANDOM_H

#include <stdint.h>

static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// Uniform on (0, 1]: its logarithm is finite.
static inline double random_unit(uint64_t *state) {
    return ((double)(random_next(state) >> 11) + 1) * 0x1p-53;
}

#endif
