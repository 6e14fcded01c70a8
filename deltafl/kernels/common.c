/* What the kernels share. The files are compiled as one text, this one first. */
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
