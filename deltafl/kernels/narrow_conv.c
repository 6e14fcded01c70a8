/* Convolution of few channels: stride 1, zeros around the image so that it keeps its size, no bias.
 *
 *     out[n,o,y,x] = sum over i, ky, kx of weight[o,i,ky,kx] * in[n,i,y+ky-P,x+kx-P], P = (K-1)/2
 *
 * With fewer than 16 channels, torch's convolutions leave most of an AVX-512 register empty. Here a
 * vector holds 16 neighbouring pixels, however few the channels are.
 *
 * A sample is copied with its zeros, row after row without a gap. Then an output is the same dot
 * product everywhere: a place p of the copy and the places p + tap of its patch, whatever the row.
 * Between two rows this computes 2P places that are not read.
 *
 * All arrays are float32 and contiguous, in torch's layouts: in [N,I,H,W], weight [O,I,K,K] with an
 * odd K, out [N,O,H,W]. One thread. The order of every sum is fixed, and of the outputs and the
 * gradients of the inputs a sample's are the same bits whatever the rest of its batch.
 */

#define STRIP (2 * WIDE) /* places computed at once */
#define GROUP 3          /* taps of a filter whose gradients are summed at once */
#define MOST 8           /* outputs computed at once: with 2 vectors each, 16 of 32 registers */

typedef struct {
    ptrdiff_t height, width, kernel;
    ptrdiff_t row;   /* floats of a row with its zeros */
    ptrdiff_t first; /* the place of the first pixel */
    ptrdiff_t run;   /* places that are computed: all rows, in whole strips */
    ptrdiff_t plane; /* floats of a channel's copy, with what its vectors reach past its end */
} field;

static field make_field(ptrdiff_t height, ptrdiff_t width, ptrdiff_t kernel) {
    field f = {.height = height, .width = width, .kernel = kernel};
    f.row = width + kernel - 1;
    f.first = kernel / 2 * (f.row + 1);
    f.run = round_up(height * f.row, STRIP);
    f.plane = round_up(f.run + (kernel - 1) * (f.row + 1), CACHE_LINE / 4);
    return f;
}

/* Copies a sample's channels to where their zeros already are. */
static void copy_in(const field *f, float *to, const float *from, ptrdiff_t channels) {
    for (ptrdiff_t c = 0; c < channels; c++)
        copy_rows(to + c * f->plane + f->first, f->row, from + c * f->height * f->width, f->height,
                  f->width);
}

/* For each tap of a filter, input channel by input channel: how far it is from the place of the
 * output. */
static void list_taps(const field *f, ptrdiff_t channels, ptrdiff_t *tap) {
    for (ptrdiff_t c = 0; c < channels; c++)
        for (ptrdiff_t ky = 0; ky < f->kernel; ky++)
            for (ptrdiff_t kx = 0; kx < f->kernel; kx++)
                *tap++ = c * f->plane + ky * f->row + kx;
}

/* `count` output channels of a sample: a constant after inlining, so that all sums stay in
 * registers. `weight` is [taps,count], `out` is [count,run]. */
INLINE void convolve_block(const field *f, const float *in, const ptrdiff_t *tap, ptrdiff_t taps,
                           const float *weight, float *out, const int count) {
    for (ptrdiff_t p = 0; p < f->run; p += STRIP) {
        wide left[MOST], right[MOST];
        for (int o = 0; o < count; o++)
            left[o] = right[o] = all_wide(0.0f);
        for (ptrdiff_t t = 0; t < taps; t++) {
            const wide a = load_wide(in + tap[t] + p), b = load_wide(in + tap[t] + p + WIDE);
            for (int o = 0; o < count; o++) {
                const wide w = all_wide(weight[t * count + o]);
                left[o] += w * a;
                right[o] += w * b;
            }
        }
        for (int o = 0; o < count; o++) {
            *(wide *)(out + o * f->run + p) = left[o];
            *(wide *)(out + o * f->run + p + WIDE) = right[o];
        }
    }
}

/* Adds to sums [count,GROUP] what a sample gives for `count` filters and a group of their taps.
 * `gradient` is at the first pixel of channels that are `plane` apart. */
INLINE void filters_block(const field *f, const float *in, const ptrdiff_t *tap,
                          const float *gradient, wide *sums, const int count) {
    wide sum[MOST * GROUP];
    for (int s = 0; s < count * GROUP; s++)
        sum[s] = sums[s];
    for (ptrdiff_t p = 0; p < f->run; p += WIDE) {
        const wide a = load_wide(in + tap[0] + p), b = load_wide(in + tap[1] + p);
        const wide c = load_wide(in + tap[2] + p);
        for (int o = 0; o < count; o++) {
            const wide g = load_wide(gradient + o * f->plane + p);
            sum[o * GROUP] += g * a;
            sum[o * GROUP + 1] += g * b;
            sum[o * GROUP + 2] += g * c;
        }
    }
    for (int s = 0; s < count * GROUP; s++)
        sums[s] = sum[s];
}

/* Blocks of 8, 4, 2 and 1 channels. */
INLINE int block_of(ptrdiff_t left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }
#define FOR_COUNT(count, DO) \
    switch (count) { \
    case 8: DO(8); break; \
    case 4: DO(4); break; \
    case 2: DO(2); break; \
    default: DO(1); \
    }

static void convolve_some(const field *f, const float *in, const ptrdiff_t *tap, ptrdiff_t taps,
                          const float *weight, float *out, int count) {
#define CONVOLVE(n) convolve_block(f, in, tap, taps, weight, out, n)
    FOR_COUNT(count, CONVOLVE)
}

static void filters_some(const field *f, const float *in, const ptrdiff_t *tap,
                         const float *gradient, wide *sums, int count) {
#define FILTERS(n) filters_block(f, in, tap, gradient, sums, n)
    FOR_COUNT(count, FILTERS)
}

/* All outputs of all samples. `packed` holds the filters block by block, [taps,count] each. */
static int convolve(const field *f, ptrdiff_t batch, ptrdiff_t inputs, ptrdiff_t outputs,
                    const float *in, const float *packed, float *out) {
    const ptrdiff_t taps = inputs * f->kernel * f->kernel, pixels = f->height * f->width;
    float *copy = zeros(inputs * f->plane, sizeof(float));
    float *found = zeros(MOST * f->run, sizeof(float));
    ptrdiff_t *tap = zeros(taps, sizeof(ptrdiff_t));
    const int failed = copy == NULL || found == NULL || tap == NULL;
    if (!failed) {
        list_taps(f, inputs, tap);
        for (ptrdiff_t n = 0; n < batch; n++) {
            copy_in(f, copy, in + n * inputs * pixels, inputs);
            float *to = out + n * outputs * pixels;
            for (ptrdiff_t o = 0; o < outputs;) {
                const int count = block_of(outputs - o);
                convolve_some(f, copy, tap, taps, packed + o * taps, found, count);
                for (int c = 0; c < count; c++)
                    for (ptrdiff_t y = 0; y < f->height; y++)
                        memcpy(to + (o + c) * pixels + y * f->width, found + c * f->run + y * f->row,
                               (size_t)f->width * sizeof(float));
                o += count;
            }
        }
    }
    free(copy);
    free(found);
    free(tap);
    return failed;
}

/* Packs the filters for `convolve`: as they are, or, for the gradient of the inputs, mirrored and
 * with inputs and outputs exchanged. */
static float *pack(ptrdiff_t inputs, ptrdiff_t outputs, ptrdiff_t size, const float *weight,
                   int mirrored) {
    float *packed = zeros(inputs * outputs * size, sizeof(float));
    if (packed == NULL)
        return NULL;
    const ptrdiff_t from = mirrored ? outputs : inputs, to = mirrored ? inputs : outputs;
    float *place = packed;
    for (ptrdiff_t o = 0; o < to;) {
        const int count = block_of(to - o);
        for (ptrdiff_t i = 0; i < from; i++)
            for (ptrdiff_t k = 0; k < size; k++)
                for (int c = 0; c < count; c++)
                    *place++ = mirrored ? weight[(i * inputs + o + c) * size + size - 1 - k]
                                        : weight[((o + c) * inputs + i) * size + k];
        o += count;
    }
    return packed;
}

static int filter_gradients(const field *f, ptrdiff_t batch, ptrdiff_t inputs, ptrdiff_t outputs,
                            const float *in, const float *gradient, float *of_weight) {
    const ptrdiff_t taps = inputs * f->kernel * f->kernel, pixels = f->height * f->width;
    const ptrdiff_t groups = (taps + GROUP - 1) / GROUP;
    float *copy = zeros(inputs * f->plane, sizeof(float));
    float *slopes = zeros(outputs * f->plane, sizeof(float));
    ptrdiff_t *tap = zeros(groups * GROUP, sizeof(ptrdiff_t));
    wide *sums = zeros(outputs * groups * GROUP, sizeof(wide));
    const int failed = copy == NULL || slopes == NULL || tap == NULL || sums == NULL;
    if (!failed) {
        list_taps(f, inputs, tap); /* what fills the last group is the first tap, and not read */
        for (ptrdiff_t n = 0; n < batch; n++) {
            copy_in(f, copy, in + n * inputs * pixels, inputs);
            copy_in(f, slopes, gradient + n * outputs * pixels, outputs);
            for (ptrdiff_t o = 0; o < outputs;) {
                const int count = block_of(outputs - o);
                for (ptrdiff_t g = 0; g < groups; g++)
                    filters_some(f, copy, tap + g * GROUP, slopes + o * f->plane + f->first,
                                 sums + (o * groups + g * count) * GROUP, count);
                o += count;
            }
        }
        for (ptrdiff_t o = 0; o < outputs;) {
            const int count = block_of(outputs - o);
            for (ptrdiff_t t = 0; t < taps; t++)
                for (int c = 0; c < count; c++)
                    of_weight[(o + c) * taps + t] =
                        sum_of_lanes(sums + (o * groups + t / GROUP * count + c) * GROUP + t % GROUP);
            o += count;
        }
    }
    free(copy);
    free(slopes);
    free(tap);
    free(sums);
    return failed;
}

/* Whether this is the processor that it was written for. */
int deltafl_narrow_conv_pays(void) {
#if defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

/* Returns 0, or 1 if there is no memory. `sizes` is {N, I, O, H, W, K}. */
int deltafl_narrow_conv_forward(const int64_t *sizes, const float *in, const float *weight,
                                float *out) {
    const field f = make_field(sizes[3], sizes[4], sizes[5]);
    float *packed = pack(sizes[1], sizes[2], sizes[5] * sizes[5], weight, 0);
    const int failed =
        packed == NULL || convolve(&f, sizes[0], sizes[1], sizes[2], in, packed, out);
    free(packed);
    return failed;
}

/* The same; `of_in` and `of_weight` may be NULL. */
int deltafl_narrow_conv_backward(const int64_t *sizes, const float *in, const float *weight,
                                 const float *gradient, float *of_in, float *of_weight) {
    const field f = make_field(sizes[3], sizes[4], sizes[5]);
    int failed = 0;
    if (of_in != NULL) {
        float *packed = pack(sizes[1], sizes[2], sizes[5] * sizes[5], weight, 1);
        failed = packed == NULL || convolve(&f, sizes[0], sizes[2], sizes[1], gradient, packed, of_in);
        free(packed);
    }
    if (of_weight != NULL && !failed)
        failed = filter_gradients(&f, sizes[0], sizes[1], sizes[2], in, gradient, of_weight);
    return failed;
}
