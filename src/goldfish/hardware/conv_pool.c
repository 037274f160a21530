/* Convolution, ReLU and 2 x 2 max-pooling as one operation, forwards and backwards.
 *
 * Compiled for one layer (see native.py): IN and OUT channels, a square KERNEL, zero PADDING, images
 * of HEIGHT x WIDTH pixels. Images have their channels last. Results of the convolution stay in
 * registers until they are pooled. Backwards, only the pixel of a window that was its maximum has a
 * gradient: a quarter of the work of a convolution that does not know of the pooling.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OUT_HEIGHT ((HEIGHT + 2 * PADDING - KERNEL + 1) / 2)
#define OUT_WIDTH ((WIDTH + 2 * PADDING - KERNEL + 1) / 2)

/* An image with its padding: values in one row of pixels, and in all of them. */
#define PITCH ((WIDTH + 2 * PADDING) * IN)
#define IMAGE ((HEIGHT + 2 * PADDING) * PITCH)

/* Values under one row of the kernel: they lie side by side. */
#define ROW (KERNEL * IN)

#ifdef __AVX512F__
#define WIDEST 16
#else
#define WIDEST 8
#endif

/* Forwards a vector holds the channels of a pixel, and LANES of them are computed together. */
#define LANES (OUT <= 4 ? 4 : OUT <= 8 ? 8 : WIDEST)
#define GROUPS ((OUT + LANES - 1) / LANES)

/* Windows that are computed together. Those at the end of a row may be computed twice. */
#define AT_ONCE (OUT_WIDTH < 5 ? OUT_WIDTH : 5)

/* Backwards a vector holds a piece of a row of the kernel. */
#define WIDE (ROW <= 8 ? 8 : WIDEST)
#define PIECES ((ROW + WIDE - 1) / WIDE)
#define ROOM (PIECES * WIDE)
#define PLACE(p) ((p) / PIECES * PITCH + (p) % PIECES * WIDE)

/* The choice of a window that ReLU switched off; else it is the place of the maximum, 0 to 3. */
#define OFF 4

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float channels __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t masks __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t places __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float piece __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

static void pad(const float *image, float *padded)
{
    for (int y = 0; y < HEIGHT; y++)
        memcpy(padded + (y + PADDING) * PITCH + PADDING * IN, image + y * WIDTH * IN,
               sizeof(float) * WIDTH * IN);
}

/* Compute a row of pixels from (x, y) on, for one group of channels. */
ALWAYS_INLINE void convolve(const float *padded, const float *weights, const float *bias, int y,
                            int x, channels sums[2 * AT_ONCE])
{
#pragma GCC unroll 16
    for (int p = 0; p < 2 * AT_ONCE; p++)
        sums[p] = *(const channels *)bias;
    for (int ky = 0; ky < KERNEL; ky++) {
        const float *from = padded + (y + ky) * PITCH + x * IN;
#pragma GCC unroll 4
        for (int k = 0; k < ROW; k++, weights += LANES) {
            channels weight = *(const channels *)weights;
#pragma GCC unroll 16
            for (int p = 0; p < 2 * AT_ONCE; p++)
                sums[p] += weight * from[p * IN + k];
        }
    }
}

ALWAYS_INLINE channels choose(masks take, channels yes, channels no)
{
    return (channels)(((masks)yes & take) | ((masks)no & ~take));
}

/* Write the maximum of a window and its place. Of equals the first is taken; what is no number
 * wins, as it does in PyTorch. */
ALWAYS_INLINE void pool(const channels window[4], int count, float *output, uint8_t *choice)
{
    channels best = window[0];
    masks at = {0};
    for (int i = 1; i < 4; i++) {
        masks take = (window[i] > best) | (window[i] != window[i]);
        best = choose(take, window[i], best);
        at = (take & i) | (at & ~take);
    }
    masks off = best <= 0;
    best = (channels)((masks)best & ~off);
    places chosen = __builtin_convertvector((off & OFF) | (at & ~off), places);
    memcpy(output, &best, sizeof(float) * count);
    memcpy(choice, &chosen, count);
}

/* Returns 1 when there is no memory. */
int forward(int count, const float *inputs, const float *weights, const float *biases,
            float *outputs, uint8_t *choices)
{
    const int size = KERNEL * ROW * LANES;
    float *padded = calloc(IMAGE + GROUPS * (size + LANES), sizeof(float));
    if (!padded)
        return 1;
    float *packed = padded + IMAGE, *bias = packed + GROUPS * size;
    for (int o = 0; o < OUT; o++) {
        bias[o] = biases[o];
        for (int k = 0; k < KERNEL * ROW; k++)
            packed[o / LANES * size + k * LANES + o % LANES] =
                weights[(o * IN + k % IN) * KERNEL * KERNEL + k / IN];
    }
    for (int n = 0; n < count; n++) {
        pad(inputs + (size_t)n * HEIGHT * WIDTH * IN, padded);
        for (int y = 0; y < OUT_HEIGHT; y++)
            for (int begin = 0; begin < OUT_WIDTH; begin += AT_ONCE)
                for (int g = 0; g < GROUPS; g++) {
                    int x = begin + AT_ONCE <= OUT_WIDTH ? begin : OUT_WIDTH - AT_ONCE;
                    int some = OUT - g * LANES < LANES ? OUT - g * LANES : LANES;
                    const float *w = packed + g * size, *b = bias + g * LANES;
                    channels above[2 * AT_ONCE], below[2 * AT_ONCE];
                    convolve(padded, w, b, 2 * y, 2 * x, above);
                    convolve(padded, w, b, 2 * y + 1, 2 * x, below);
                    for (int p = 0; p < AT_ONCE; p++) {
                        channels window[4] = {above[2 * p], above[2 * p + 1], below[2 * p],
                                              below[2 * p + 1]};
                        size_t to = ((size_t)n * OUT_HEIGHT + y) * OUT_WIDTH + x + p;
                        to = to * OUT + g * LANES;
                        pool(window, some, outputs + to, choices + to);
                    }
                }
    }
    free(padded);
    return 0;
}

/* gradients are floats, read as bits. input_gradients may be NULL: they are then not computed.
 * An infinite gradient may make neighbours in its row NaN, where the kernel has no weight.
 * Returns 1 when there is no memory. */
int backward(int count, const float *inputs, const float *weights, const uint8_t *choices,
             const int32_t *gradients, float *weight_gradients, float *bias_gradients,
             float *input_gradients)
{
    /* Tables instead of a branch: half of the windows are off, and no one can guess which. */
    static const int shift[] = {0, IN, PITCH, PITCH + IN, 0};
    static const int32_t on[] = {-1, -1, -1, -1, 0};
    const int size = KERNEL * ROOM;
    /* The last piece of a row may reach beyond the image. */
    float *padded = calloc(2 * (IMAGE + WIDE) + 2 * OUT * size, sizeof(float));
    if (!padded)
        return 1;
    float *back = padded + IMAGE + WIDE, *packed = back + IMAGE + WIDE, *sums = packed + OUT * size;
    for (int o = 0; o < OUT; o++) {
        bias_gradients[o] = 0;
        for (int ky = 0; ky < KERNEL; ky++)
            for (int k = 0; k < ROW; k++)
                packed[o * size + ky * ROOM + k] =
                    weights[((o * IN + k % IN) * KERNEL + ky) * KERNEL + k / IN];
    }
    for (int n = 0; n < count; n++) {
        pad(inputs + (size_t)n * HEIGHT * WIDTH * IN, padded);
        if (input_gradients)
            memset(back, 0, sizeof(float) * IMAGE);
        for (int o = 0; o < OUT; o++) {
            const size_t windows = (size_t)n * OUT_HEIGHT * OUT_WIDTH * OUT + o;
            const uint8_t *choice = choices + windows;
            const int32_t *gradient = gradients + windows;
            float bias = 0;
            piece sum[KERNEL * PIECES], weight[KERNEL * PIECES];
            memcpy(sum, sums + o * size, sizeof sum);
            memcpy(weight, packed + o * size, sizeof weight);
            for (int y = 0; y < OUT_HEIGHT; y++)
                for (int x = 0; x < OUT_WIDTH; x++, choice += OUT, gradient += OUT) {
                    const int at = 2 * y * PITCH + 2 * x * IN + shift[*choice];
                    const union { int32_t bits; float value; } kept = {*gradient & on[*choice]};
                    const float g = kept.value;
                    bias += g;
#pragma GCC unroll 32
                    for (int p = 0; p < KERNEL * PIECES; p++)
                        sum[p] += g * *(const piece *)(padded + at + PLACE(p));
                    if (!input_gradients)
                        continue;
#pragma GCC unroll 32
                    for (int p = 0; p < KERNEL * PIECES; p++)
                        *(piece *)(back + at + PLACE(p)) += g * weight[p];
                }
            memcpy(sums + o * size, sum, sizeof sum);
            bias_gradients[o] += bias;
        }
        if (input_gradients)
            for (int y = 0; y < HEIGHT; y++)
                memcpy(input_gradients + ((size_t)n * HEIGHT + y) * WIDTH * IN,
                       back + (y + PADDING) * PITCH + PADDING * IN, sizeof(float) * WIDTH * IN);
    }
    for (int o = 0; o < OUT; o++)
        for (int ky = 0; ky < KERNEL; ky++)
            for (int k = 0; k < ROW; k++)
                weight_gradients[((o * IN + k % IN) * KERNEL + ky) * KERNEL + k / IN] =
                    sums[o * size + ky * ROOM + k];
    free(padded);
    return 0;
}
