/* Valid convolution, bias, channel scale, 2x2 max-pool and relu in one pass, and its gradients.
 *
 *     out[n,o] = relu(max_pool2x2(scale[n,o] * (conv(in[n], weight[o]) + bias[o])))
 *
 * What makes it fast, next to one operation after the other:
 *   - nothing of the size of the convolution's output is ever stored;
 *   - a (sample, channel) pair whose scale is zero is not computed, forward or backward;
 *   - backward visits only the one position of each pooling window that made it through the
 *     max-pool and the relu: a quarter of the positions at most.
 *
 * All arrays are float32 and contiguous, in torch's layouts: in [N,I,H,W], weight [O,I,K,K],
 * out [N,O,(H-K+1)/2,(W-K+1)/2]. One thread. The order of every sum is fixed: a sample's results
 * are the same bits whatever the rest of its batch and whichever of its channels are dropped.
 *
 * Plain C with the vector extensions of GCC and Clang. A vector holds 8 floats, which is one
 * AVX register and two NEON or SSE registers.
 */
#define LANES 8

typedef float vec __attribute__((vector_size(32)));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef float unaligned_vec __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Keeps a vector in a register of its own from here on. GCC otherwise loads inputs again for each
 * of their uses, more than the processor can load, and runs out of registers by loading weights
 * early. */
#if defined(__AVX__)
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v) (void)(v)
#endif

INLINE vec load(const float *from) { return *(const unaligned_vec *)from; }
INLINE void store(float *to, vec value) { *(unaligned_vec *)to = value; }
INLINE vec all(float x) { return (vec){x, x, x, x, x, x, x, x}; }
INLINE ivec all_int(int32_t x) { return (ivec){x, x, x, x, x, x, x, x}; }
INLINE ivec choose_int(ivec mask, ivec yes, ivec no) { return (mask & yes) | (~mask & no); }
INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)choose_int(mask, (ivec)yes, (ivec)no);
}

typedef struct {
    ptrdiff_t batch, inputs, outputs, height, width, kernel;
    ptrdiff_t pooled_height, pooled_width, pooled; /* of an output plane */
} shape;

static shape make_shape(const int64_t *sizes) {
    shape s = {.batch = sizes[0], .inputs = sizes[1], .outputs = sizes[2],
               .height = sizes[3], .width = sizes[4], .kernel = sizes[5]};
    s.pooled_height = (s.height - s.kernel + 1) / 2;
    s.pooled_width = (s.width - s.kernel + 1) / 2;
    s.pooled = s.pooled_height * s.pooled_width;
    return s;
}

/* Backward keeps a sample pixel by pixel, [H,W,depth], so that a row of the patch under a filter is
 * one run of K * depth floats. Where the channels fill vectors reasonably, depth is rounded up to
 * whole vectors, which are then never misaligned. The filters and the sums of their gradients have
 * the same layout, [O,K,run]; their runs are rounded up to whole vectors, the rest of the last
 * vector is zero in the filters and garbage that is not read in the sums. */
typedef struct {
    ptrdiff_t depth, row, run; /* floats of a pixel, of a row of pixels, of a row of a filter */
} layout;

static layout make_layout(const shape *s) {
    layout l;
    l.depth = s->inputs < 6 ? s->inputs : round_up(s->inputs, LANES);
    l.row = s->width * l.depth;
    l.run = round_up(s->kernel * l.depth, LANES);
    return l;
}

/* Whether `next` replaces the maximum so far: the first of equals stays, and NaN wins, as in
 * torch. */
INLINE ivec beats(vec next, vec best) { return (next > best) | (next != next); }

INLINE void store_half(void *to, const void *from, ptrdiff_t count) {
    if (count >= LANES / 2)
        memcpy(to, from, LANES / 2 * sizeof(float));
    else
        memcpy(to, from, (size_t)count * sizeof(float));
}

/* One pooled row of one channel. */
typedef struct {
    float scale;
    float *out;
    int32_t *winner; /* or NULL */
} target;

/* Pools two rows of 8 convolution outputs into 4, for two channels a and b at once, and stores
 * the first `count` of them. A winner says which output was the maximum of its pooling window, as
 * the place of its patch in the layout of backward, or is negative if relu stops it: that is all
 * that backward needs to know. `origin` is the place of the first output's patch. */
INLINE void pool(vec top_a, vec bottom_a, target a, vec top_b, vec bottom_b, target b,
                 int32_t origin, layout l, ptrdiff_t count) {
/* Even and odd columns, as a a b b a a b b: one AVX instruction each. */
#define LEFT(x, y) SHUFFLE(x, y, 0, 2, 8, 10, 4, 6, 12, 14)
#define RIGHT(x, y) SHUFFLE(x, y, 1, 3, 9, 11, 5, 7, 13, 15)
#define SORTED(x) SHUFFLE(x, x, 0, 1, 4, 5, 2, 3, 6, 7)
    const float p = a.scale, q = b.scale;
    const vec scale = {p, p, q, q, p, p, q, q};
    const vec top_left = LEFT(top_a, top_b) * scale, top_right = RIGHT(top_a, top_b) * scale;
    const vec bottom_left = LEFT(bottom_a, bottom_b) * scale;
    const vec bottom_right = RIGHT(bottom_a, bottom_b) * scale;
    const ivec top_is_right = beats(top_right, top_left);
    const ivec bottom_is_right = beats(bottom_right, bottom_left);
    const vec top = choose(top_is_right, top_right, top_left);
    const vec bottom = choose(bottom_is_right, bottom_right, bottom_left);
    const ivec is_bottom = beats(bottom, top);
    const vec best = choose(is_bottom, bottom, top);
    const ivec stopped = best <= all(0.0f); /* false for NaN, which relu lets through */
    const vec sorted = SORTED((vec)(~stopped & (ivec)best));
    const float *values = (const float *)&sorted;
    store_half(a.out, values, count);
    store_half(b.out, values + LANES / 2, count);
    if (a.winner == NULL)
        return;
    const ivec pixel = all_int((int32_t)l.depth), columns = {0, 2, 0, 2, 4, 6, 4, 6};
    const ivec right = choose_int(is_bottom, bottom_is_right, top_is_right) & pixel;
    const ivec down = is_bottom & all_int((int32_t)l.row);
    const ivec winner = SORTED((all_int(origin) + columns * pixel + right + down) | stopped);
    const int32_t *winners = (const int32_t *)&winner;
    store_half(a.winner, winners, count);
    store_half(b.winner, winners + LANES / 2, count);
}

#define BLOCK 6
/* One statement for each of the `count` channels of a block; `count` is a constant after
 * inlining, so what is left is straight code on named registers. */
#define EACH(DO) \
    DO(0) \
    if (count > 1) { DO(1) } \
    if (count > 2) { DO(2) } \
    if (count > 3) { DO(3) } \
    if (count > 4) { DO(4) } \
    if (count > 5) { DO(5) }

/* Each sample is computed from a copy: its rows begin at cache lines, which spares loads that
 * straddle two of them, and vectors that reach past the last row read memory that is there. */
INLINE ptrdiff_t row_stride(const shape *s) { return round_up(s->width, CACHE_LINE / 4); }

/* Up to 6 output channels of one sample, 2 rows by 8 columns at a time: 12 vectors of sums stay
 * in registers (AVX2 has 16), enough to keep two multiply-add units busy. */
INLINE void forward_block(const shape *s, const float *in, const float *weight, const float *bias,
                          const float *scale, const ptrdiff_t *channel, float *out,
                          int32_t *winner, const ptrdiff_t kernel, const int count) {
    const layout l = make_layout(s);
    const ptrdiff_t stride = row_stride(s), plane = s->height * stride;
    const ptrdiff_t filter = s->inputs * kernel * kernel;
#define FILTER(i) const float *const filter##i = weight + channel[i < count ? i : 0] * filter;
    FILTER(0) FILTER(1) FILTER(2) FILTER(3) FILTER(4) FILTER(5)
    for (ptrdiff_t row = 0; row < s->pooled_height; row++)
        for (ptrdiff_t column = 0; column < s->pooled_width; column += LANES / 2) {
            vec top0, top1, top2, top3, top4, top5;
            vec bottom0, bottom1, bottom2, bottom3, bottom4, bottom5;
#define BEGIN(i) top##i = bottom##i = all(bias[channel[i]]);
            EACH(BEGIN)
            const float *corner = in + 2 * row * stride + 2 * column;
            ptrdiff_t tap = 0;
            for (ptrdiff_t input = 0; input < s->inputs; input++, corner += plane) {
                const float *line = corner;
                for (ptrdiff_t ky = 0; ky < kernel; ky++, line += stride)
                    for (ptrdiff_t kx = 0; kx < kernel; kx++, tap++) {
                        vec upper = load(line + kx), lower = load(line + stride + kx);
                        KEEP(upper);
                        KEEP(lower);
#define ADD(i) \
    { \
        vec w = all(filter##i[tap]); \
        KEEP(w); \
        top##i += w * upper; \
        bottom##i += w * lower; \
    }
                        EACH(ADD)
                    }
            }
            const ptrdiff_t at = row * s->pooled_width + column;
            const int32_t origin = (int32_t)(2 * row * l.row + 2 * column * l.depth);
#define TARGET(i) \
    ((target){scale == NULL ? 1.0f : scale[channel[i]], out + channel[i] * s->pooled + at, \
              winner == NULL ? NULL : winner + channel[i] * s->pooled + at})
/* Of an odd number of channels the last one is its own partner. */
#define POOL(i, j) \
    if (i < count) { \
        const target a = TARGET(i), b = TARGET(j < count ? j : i); \
        pool(top##i, bottom##i, a, j < count ? top##j : top##i, \
             j < count ? bottom##j : bottom##i, b, origin, l, \
             s->pooled_width - column); \
    }
            POOL(0, 1) POOL(2, 3) POOL(4, 5)
        }
}

#define FORWARD_BLOCK(name, kernel) \
    static void name(const shape *s, const float *in, const float *weight, const float *bias, \
                     const float *scale, const ptrdiff_t *channel, int count, float *out, \
                     int32_t *winner) { \
        switch (count) { \
        case 1: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 1); break; \
        case 2: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 2); break; \
        case 3: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 3); break; \
        case 4: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 4); break; \
        case 5: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 5); break; \
        default: forward_block(s, in, weight, bias, scale, channel, out, winner, kernel, 6); \
        } \
    }
FORWARD_BLOCK(forward_block_5, 5) /* the paper's filters: their loops unroll */
FORWARD_BLOCK(forward_block_any, s->kernel)

/* Returns 0, or 1 if there is no memory. `sizes` is {N, I, O, H, W, K}. `scale` may be NULL, for
 * all ones, and so may `winner`, if no gradient will be wanted. */
int deltafl_conv_pool_relu_forward(const int64_t *sizes, const float *in, const float *weight,
                                   const float *bias, const float *scale, float *out,
                                   int32_t *winner) {
    const shape s = make_shape(sizes);
    const ptrdiff_t rows = s.inputs * s.height, stride = row_stride(&s);
    float *copy = zeros(rows * stride + LANES, sizeof(float));
    ptrdiff_t *alive = zeros(s.outputs, sizeof(ptrdiff_t));
    const int failed = copy == NULL || alive == NULL;
    for (ptrdiff_t n = 0; n < s.batch && !failed; n++) {
        copy_rows(copy, stride, in, rows, s.width);
        ptrdiff_t count = 0;
        for (ptrdiff_t o = 0; o < s.outputs; o++)
            if (scale == NULL || scale[o] != 0.0f)
                alive[count++] = o;
            else /* backward skips it too, and never looks at its winners */
                memset(out + o * s.pooled, 0, (size_t)s.pooled * sizeof(float));
        /* Blocks of equal size: 7 channels are 4 and 3, not 6 and a slow single one. */
        for (ptrdiff_t blocks = (count + BLOCK - 1) / BLOCK, done = 0; blocks > 0; blocks--) {
            const int size = (int)((count - done + blocks - 1) / blocks);
            (s.kernel == 5 ? forward_block_5 : forward_block_any)(
                &s, copy, weight, bias, scale, alive + done, size, out, winner);
            done += size;
        }
        in += rows * s.width;
        out += s.outputs * s.pooled;
        winner = winner == NULL ? NULL : winner + s.outputs * s.pooled;
        scale = scale == NULL ? NULL : scale + s.outputs;
    }
    free(copy);
    free(alive);
    return failed;
}

/* Transposes 8 rows of 8: pairs of elements, then pairs of pairs, then halves change places. */
INLINE void transpose(vec r[LANES]) {
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_PAIRS(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW_HALVES(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_HALVES(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
    const vec a0 = LOW(r[0], r[1]), a1 = HIGH(r[0], r[1]), a2 = LOW(r[2], r[3]);
    const vec a3 = HIGH(r[2], r[3]), a4 = LOW(r[4], r[5]), a5 = HIGH(r[4], r[5]);
    const vec a6 = LOW(r[6], r[7]), a7 = HIGH(r[6], r[7]);
    const vec b0 = LOW_PAIRS(a0, a2), b1 = HIGH_PAIRS(a0, a2), b2 = LOW_PAIRS(a1, a3);
    const vec b3 = HIGH_PAIRS(a1, a3), b4 = LOW_PAIRS(a4, a6), b5 = HIGH_PAIRS(a4, a6);
    const vec b6 = LOW_PAIRS(a5, a7), b7 = HIGH_PAIRS(a5, a7);
    r[0] = LOW_HALVES(b0, b4), r[1] = LOW_HALVES(b1, b5), r[2] = LOW_HALVES(b2, b6);
    r[3] = LOW_HALVES(b3, b7), r[4] = HIGH_HALVES(b0, b4), r[5] = HIGH_HALVES(b1, b5);
    r[6] = HIGH_HALVES(b2, b6), r[7] = HIGH_HALVES(b3, b7);
}

/* [channels,pixels] to [pixels,depth]. */
static void to_pixels(float *restrict to, const float *restrict from, ptrdiff_t channels,
                      ptrdiff_t pixels, ptrdiff_t depth) {
    ptrdiff_t p = 0;
    if (depth == 1) {
        memcpy(to, from, (size_t)pixels * sizeof(float));
        return;
    }
    if (depth % LANES == 0)
        for (; p + LANES <= pixels; p += LANES)
            for (ptrdiff_t c = 0; c < channels; c += LANES) {
                vec r[LANES];
                /* The last channel again and again for those that are not there. */
                for (ptrdiff_t i = 0; i < LANES; i++)
                    r[i] = load(from + (c + i < channels ? c + i : channels - 1) * pixels + p);
                transpose(r);
                for (ptrdiff_t i = 0; i < LANES; i++)
                    store(to + (p + i) * depth + c, r[i]);
            }
    for (ptrdiff_t c = 0; c < channels; c++)
        for (ptrdiff_t rest = p; rest < pixels; rest++)
            to[rest * depth + c] = from[c * pixels + rest];
}

/* And back. */
static void to_planes(float *restrict to, const float *restrict from, ptrdiff_t channels,
                      ptrdiff_t pixels, ptrdiff_t depth) {
    ptrdiff_t p = 0;
    if (depth % LANES == 0)
        for (; p + LANES <= pixels; p += LANES)
            for (ptrdiff_t c = 0; c < channels; c += LANES) {
                vec r[LANES];
                for (ptrdiff_t i = 0; i < LANES; i++)
                    r[i] = load(from + (p + i) * depth + c);
                transpose(r);
                for (ptrdiff_t i = 0; i < LANES && c + i < channels; i++)
                    store(to + (c + i) * pixels + p, r[i]);
            }
    for (ptrdiff_t c = 0; c < channels; c++)
        for (ptrdiff_t rest = p; rest < pixels; rest++)
            to[c * pixels + rest] = from[rest * depth + c];
}

/* The positions of one (sample, channel) pair that a gradient flows through: where the patch
 * under the filter begins in the sample, and the gradient there, padded with zeros to whole
 * vectors. */
typedef struct {
    ptrdiff_t count;
    int32_t *at;
    float *gradient;
} hits;

/* Not inlined: inside its long caller it would run out of registers. */
__attribute__((noinline)) static ptrdiff_t
find_hits(ptrdiff_t pooled, const int32_t *winner, const float *gradient, float scale, int32_t *at,
          float *kept) {
    ptrdiff_t count = 0;
    for (ptrdiff_t i = 0; i < pooled; i++) {
        /* Always written, but counted only if it is a hit: cheaper than a branch that cannot be
         * predicted. */
        const int32_t position = winner[i];
        at[count] = position;
        kept[count] = gradient[i] * scale;
        count += position >= 0;
    }
    store(kept + count, all(0.0f));
    return count;
}

static float total(const hits *h) {
    vec sums = all(0.0f);
    for (ptrdiff_t j = 0; j < h->count; j += LANES)
        sums += load(h->gradient + j);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* Adds the sum over the hits of gradient x patch to some vectors of a filter's gradient, which
 * begin `offset` floats into the patch: to 10 of them, */
static void weight_ten(const hits *h, const float *in, const ptrdiff_t *offset, float *sum) {
    const ptrdiff_t count = h->count;
    const int32_t *const at = h->at;
    const float *const gradient = h->gradient;
    vec sum0 = all(0), sum1 = all(0), sum2 = all(0), sum3 = all(0), sum4 = all(0);
    vec sum5 = all(0), sum6 = all(0), sum7 = all(0), sum8 = all(0), sum9 = all(0);
    for (ptrdiff_t j = 0; j < count; j++) {
        const vec g = all(gradient[j]);
        const float *const patch = in + at[j];
#define TEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9)
#define TAP(i) sum##i += g * load(patch + offset[i]);
        TEN(TAP)
    }
#define SAVE(i) store(sum + i * LANES, load(sum + i * LANES) + sum##i);
    TEN(SAVE)
}

/* or to at most 5, where two sets of sums, of the even and of the odd hits, are needed to hide the
 * latency of the additions. */
INLINE void weight_few(const hits *h, const float *in, const ptrdiff_t *offset, float *sum,
                       const int vectors) {
    const ptrdiff_t count = h->count;
    const int32_t *const at = h->at;
    const float *const gradient = h->gradient;
    vec even0 = all(0), even1 = all(0), even2 = all(0), even3 = all(0), even4 = all(0);
    vec odd0 = all(0), odd1 = all(0), odd2 = all(0), odd3 = all(0), odd4 = all(0);
#define FEW(DO, set) \
    DO(set, 0) \
    if (vectors > 1) { DO(set, 1) } \
    if (vectors > 2) { DO(set, 2) } \
    if (vectors > 3) { DO(set, 3) } \
    if (vectors > 4) { DO(set, 4) }
#define TAP_OF(set, i) set##i += g * load(patch + offset[i]);
#define HIT(set, j) \
    { \
        const vec g = all(gradient[j]); \
        const float *const patch = in + at[j]; \
        FEW(TAP_OF, set) \
    }
    ptrdiff_t j = 0;
    for (; j + 1 < count; j += 2) {
        HIT(even, j)
        HIT(odd, j + 1)
    }
    if (j < count)
        HIT(even, j)
#define SAVE_OF(set, i) store(sum + i * LANES, load(sum + i * LANES) + (set##i + odd##i));
    FEW(SAVE_OF, even)
}

static void weight_gradient(const hits *h, const float *in, const ptrdiff_t *offset,
                            ptrdiff_t vectors, float *sum) {
    for (; vectors >= 10; vectors -= 10, offset += 10, sum += 10 * LANES)
        weight_ten(h, in, offset, sum);
    for (; vectors > 0; vectors -= 5, offset += 5, sum += 5 * LANES)
        switch (vectors) {
        case 1: weight_few(h, in, offset, sum, 1); break;
        case 2: weight_few(h, in, offset, sum, 2); break;
        case 3: weight_few(h, in, offset, sum, 3); break;
        case 4: weight_few(h, in, offset, sum, 4); break;
        default: weight_few(h, in, offset, sum, 5);
        }
}

/* Adds gradient x filter to the patch of each hit. The hits are the outer loop because
 * neighbouring patches overlap: what one of them stores should have settled before the next one
 * loads it. */
INLINE void input_gradient(const hits *h, const float *filter, ptrdiff_t row,
                           const ptrdiff_t run, const ptrdiff_t kernel, float *gradient) {
    for (ptrdiff_t j = 0; j < h->count; j++) {
        const vec g = all(h->gradient[j]);
        const float *w = filter;
        float *patch = gradient + h->at[j];
        for (ptrdiff_t ky = 0; ky < kernel; ky++, w += run, patch += row)
            for (ptrdiff_t x = 0; x < run; x += LANES)
                store(patch + x, load(patch + x) + g * load(w + x));
    }
}

/* Does something for each weight in torch's order; `at` is its place in an array of filters. */
#define EACH_WEIGHT(s, l, filters, DO) \
    for (ptrdiff_t o = 0; o < s.outputs; o++) \
        for (ptrdiff_t c = 0; c < s.inputs; c++) \
            for (ptrdiff_t ky = 0; ky < s.kernel; ky++) { \
                float *at = filters + (o * s.kernel + ky) * l.run + c; \
                for (ptrdiff_t kx = 0; kx < s.kernel; kx++, at += l.depth) \
                    DO; \
            }

/* Returns 0, or 1 if there is no memory. `grad_in` may be NULL, and so may `grad_weight` and
 * `grad_bias`: what is not wanted is not computed. */
int deltafl_conv_pool_relu_backward(const int64_t *sizes, const float *in, const float *weight,
                                    const float *scale, const int32_t *winner,
                                    const float *grad_out, float *grad_in, float *grad_weight,
                                    float *grad_bias) {
    const shape s = make_shape(sizes);
    const layout l = make_layout(&s);
    const ptrdiff_t pixels = s.height * s.width, image = pixels * l.depth + l.run;
    const ptrdiff_t filter = s.kernel * l.run, vectors = filter / LANES;
    float *copy = zeros(image, sizeof(float));
    float *grad_copy = zeros(image, sizeof(float));
    float *sums = zeros(s.outputs * filter, sizeof(float));
    float *filters = zeros(s.outputs * filter, sizeof(float));
    ptrdiff_t *offset = zeros(vectors, sizeof(ptrdiff_t));
    hits h = {0, zeros(s.pooled + 1, sizeof(int32_t)), zeros(s.pooled + LANES, sizeof(float))};
    const int failed = copy == NULL || grad_copy == NULL || sums == NULL || filters == NULL ||
                       offset == NULL || h.at == NULL || h.gradient == NULL;
    if (failed)
        goto end;
    for (ptrdiff_t i = 0; i < vectors; i++)
        offset[i] = i * LANES / l.run * l.row + i * LANES % l.run;
    if (grad_in != NULL)
        EACH_WEIGHT(s, l, filters, *at = *weight++)
    if (grad_bias != NULL)
        memset(grad_bias, 0, (size_t)s.outputs * sizeof(float));
    for (ptrdiff_t n = 0; n < s.batch; n++) {
        if (grad_weight != NULL)
            to_pixels(copy, in + n * s.inputs * pixels, s.inputs, pixels, l.depth);
        if (grad_in != NULL)
            memset(grad_copy, 0, (size_t)image * sizeof(float));
        for (ptrdiff_t o = 0; o < s.outputs; o++) {
            const ptrdiff_t pair = n * s.outputs + o;
            const float factor = scale == NULL ? 1.0f : scale[pair];
            if (factor == 0.0f)
                continue;
            h.count = find_hits(s.pooled, winner + pair * s.pooled, grad_out + pair * s.pooled,
                                factor, h.at, h.gradient);
            if (grad_weight != NULL)
                weight_gradient(&h, copy, offset, vectors, sums + o * filter);
            if (grad_bias != NULL)
                grad_bias[o] += total(&h);
            if (grad_in != NULL && l.run == 80 && s.kernel == 5) /* the paper's second layer */
                input_gradient(&h, filters + o * filter, l.row, 80, 5, grad_copy);
            else if (grad_in != NULL)
                input_gradient(&h, filters + o * filter, l.row, l.run, s.kernel, grad_copy);
        }
        if (grad_in != NULL)
            to_planes(grad_in + n * s.inputs * pixels, grad_copy, s.inputs, pixels, l.depth);
    }
    if (grad_weight != NULL)
        EACH_WEIGHT(s, l, sums, *grad_weight++ = *at)
end:
    free(copy);
    free(grad_copy);
    free(sums);
    free(filters);
    free(offset);
    free(h.at);
    free(h.gradient);
    return failed;
}
