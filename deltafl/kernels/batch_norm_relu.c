/* Batch normalisation, the sum with a shortcut's maps, and relu, in two passes, and its gradients.
 *
 *     out = relu((in - mean) / sqrt(variance + eps) * weight + bias + shortcut)
 *
 * Mean and variance are a channel's over the batch, as in training. Maps are larger than the cache,
 * so time goes into reading and writing them, which one operation after the other does twice as
 * often.
 *
 * All maps are float32 and contiguous, [N,C,P] with P pixels. One thread. The order of every sum is
 * fixed: float32 within a plane, float64 from plane to plane.
 */

typedef struct {
    ptrdiff_t batch, channels, pixels;
} maps;

static maps make_maps(const int64_t *sizes) {
    return (maps){.batch = sizes[0], .channels = sizes[1], .pixels = sizes[2]};
}

/* Up to 16 pixels, of which there are `count`; the rest of the vector is `fill`. */
INLINE wide take(const float *from, ptrdiff_t count, float fill) {
    if (count >= WIDE)
        return load_wide(from);
    wide vector = all_wide(fill);
    memcpy(&vector, from, (size_t)count * sizeof(float));
    return vector;
}

INLINE void put(float *to, wide vector, ptrdiff_t count) {
    if (count >= WIDE)
        *(unaligned_wide *)to = vector;
    else
        memcpy(to, &vector, (size_t)count * sizeof(float));
}

INLINE wide where(iwide mask, wide yes) { return (wide)(mask & (iwide)yes); }

/* Means of the channels, and sums of squares about them: plane by plane (Chan, Golub and LeVeque
 * 1983). */
static void channel_statistics(const maps *m, const float *in, double *mean, double *squares) {
    for (ptrdiff_t n = 0; n < m->batch; n++)
        for (ptrdiff_t c = 0; c < m->channels; c++) {
            const float *plane = in + (n * m->channels + c) * m->pixels;
            wide sums = all_wide(0.0f);
            for (ptrdiff_t i = 0; i < m->pixels; i += WIDE)
                sums += take(plane + i, m->pixels - i, 0.0f);
            const double middle = sum_of_lanes(&sums) / (double)m->pixels;
            sums = all_wide(0.0f);
            for (ptrdiff_t i = 0; i < m->pixels; i += WIDE) {
                const wide x = take(plane + i, m->pixels - i, (float)middle);
                sums += (x - all_wide((float)middle)) * (x - all_wide((float)middle));
            }
            const double apart = middle - mean[c], before = (double)n / (double)(n + 1);
            squares[c] += sum_of_lanes(&sums) + apart * apart * before * (double)m->pixels;
            mean[c] += apart / (double)(n + 1);
        }
}

/* Returns 0, or 1 if there is no memory. `sizes` is {N, C, P}. `shortcut` may be NULL. `mean` and
 * `scale`, 1 / sqrt(variance + eps), are for backward; `running_mean` and `running_variance` are
 * moved towards the batch's by `momentum`. */
int deltafl_batch_norm_relu_forward(const int64_t *sizes, const float *in, const float *weight,
                                    const float *bias, const float *shortcut, int relu, double eps,
                                    double momentum, float *running_mean, float *running_variance,
                                    float *out, float *mean, float *scale) {
    const maps m = make_maps(sizes);
    const double count = (double)(m.batch * m.pixels);
    double *means = zeros(m.channels, sizeof(double)), *squares = zeros(m.channels, sizeof(double));
    const int failed = means == NULL || squares == NULL;
    if (!failed) {
        channel_statistics(&m, in, means, squares);
        for (ptrdiff_t c = 0; c < m.channels; c++) {
            mean[c] = (float)means[c];
            scale[c] = (float)(1.0 / sqrt(squares[c] / count + eps));
            running_mean[c] = (float)(momentum * means[c] + (1.0 - momentum) * running_mean[c]);
            running_variance[c] = (float)(momentum * squares[c] / (count - 1.0) +
                                          (1.0 - momentum) * running_variance[c]);
        }
        for (ptrdiff_t n = 0; n < m.batch; n++)
            for (ptrdiff_t c = 0; c < m.channels; c++) {
                const ptrdiff_t at = (n * m.channels + c) * m.pixels;
                const wide slope = all_wide(scale[c] * weight[c]);
                const wide middle = all_wide(mean[c]), offset = all_wide(bias[c]);
                for (ptrdiff_t i = 0; i < m.pixels; i += WIDE) {
                    const ptrdiff_t left = m.pixels - i;
                    wide y = (take(in + at + i, left, 0.0f) - middle) * slope + offset;
                    if (shortcut != NULL)
                        y += take(shortcut + at + i, left, 0.0f);
                    if (relu)
                        y = where(~(y <= all_wide(0.0f)), y); /* lets NaN through, as torch does */
                    put(out + at + i, y, left);
                }
            }
    }
    free(means);
    free(squares);
    return failed;
}

/* The same. `out` is NULL if there was no relu, `of_shortcut` if there was no shortcut or its
 * gradient is that of the output. */
int deltafl_batch_norm_relu_backward(const int64_t *sizes, const float *in, const float *weight,
                                     const float *mean, const float *scale, const float *out,
                                     const float *gradient, float *of_in, float *of_weight,
                                     float *of_bias, float *of_shortcut) {
    const maps m = make_maps(sizes);
    const double count = (double)(m.batch * m.pixels);
    double *sums = zeros(m.channels, sizeof(double)), *products = zeros(m.channels, sizeof(double));
    const int failed = sums == NULL || products == NULL;
    if (!failed) {
/* What relu let through of the gradient. */
#define PASSED(at, left) \
    (out == NULL ? take(gradient + (at), left, 0.0f) \
                 : where(~(take(out + (at), left, 0.0f) <= all_wide(0.0f)), \
                         take(gradient + (at), left, 0.0f)))
        for (ptrdiff_t n = 0; n < m.batch; n++)
            for (ptrdiff_t c = 0; c < m.channels; c++) {
                const ptrdiff_t at = (n * m.channels + c) * m.pixels;
                const wide middle = all_wide(mean[c]);
                wide sum = all_wide(0.0f), product = all_wide(0.0f);
                for (ptrdiff_t i = 0; i < m.pixels; i += WIDE) {
                    const ptrdiff_t left = m.pixels - i;
                    const wide g = PASSED(at + i, left);
                    sum += g;
                    product += g * (take(in + at + i, left, mean[c]) - middle);
                }
                sums[c] += sum_of_lanes(&sum);
                products[c] += sum_of_lanes(&product);
            }
        for (ptrdiff_t c = 0; c < m.channels; c++) {
            of_bias[c] = (float)sums[c];
            of_weight[c] = (float)(products[c] * scale[c]);
        }
        for (ptrdiff_t n = 0; n < m.batch; n++)
            for (ptrdiff_t c = 0; c < m.channels; c++) {
                const ptrdiff_t at = (n * m.channels + c) * m.pixels;
                const wide middle = all_wide(mean[c]), slope = all_wide(scale[c] * weight[c]);
                const wide lost = all_wide((float)(sums[c] / count));
                const wide turned =
                    all_wide((float)(products[c] * scale[c] * scale[c] / count));
                for (ptrdiff_t i = 0; i < m.pixels; i += WIDE) {
                    const ptrdiff_t left = m.pixels - i;
                    const wide g = PASSED(at + i, left);
                    const wide x = take(in + at + i, left, 0.0f) - middle;
                    put(of_in + at + i, (g - lost - x * turned) * slope, left);
                    if (of_shortcut != NULL)
                        put(of_shortcut + at + i, g, left);
                }
            }
    }
    free(sums);
    free(products);
    return failed;
}
