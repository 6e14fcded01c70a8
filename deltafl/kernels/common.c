/* What the kernels share. The files are compiled as one text, this one first. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CACHE_LINE 64
#define INLINE static inline __attribute__((always_inline))

INLINE ptrdiff_t round_up(ptrdiff_t count, ptrdiff_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
}

/* Zeros, aligned to cache lines; NULL if there is no memory. */
static void *zeros(ptrdiff_t count, size_t size) {
    const size_t bytes = (size_t)round_up(count * (ptrdiff_t)size, CACHE_LINE);
    void *memory = aligned_alloc(CACHE_LINE, bytes);
    return memory == NULL ? NULL : memset(memory, 0, bytes);
}

/* Rows are short: a call of memcpy for each would cost more than the copying. */
static void copy_rows(float *restrict to, ptrdiff_t stride, const float *restrict from,
                      ptrdiff_t rows, ptrdiff_t width) {
    for (; rows > 0; rows--, to += stride, from += width) {
        ptrdiff_t x = 0;
        for (; x + 4 <= width; x += 4)
            memcpy(to + x, from + x, 4 * sizeof(float));
        for (; x < width; x++)
            to[x] = from[x];
    }
}

/* 16 floats: one AVX-512 register, two of AVX. */
#define WIDE 16

typedef float wide __attribute__((vector_size(64)));
typedef int32_t iwide __attribute__((vector_size(64)));
typedef float unaligned_wide __attribute__((vector_size(64), aligned(4), may_alias));

INLINE wide load_wide(const float *from) { return *(const unaligned_wide *)from; }
INLINE wide all_wide(float x) {
    return (wide){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

/* The sum of a vector, always in the same order. */
static float sum_of_lanes(const wide *vector) {
    const float *lane = (const float *)vector;
    float sum[WIDE];
    memcpy(sum, lane, sizeof(sum));
    for (int half = WIDE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] += sum[i + half];
    return sum[0];
}
