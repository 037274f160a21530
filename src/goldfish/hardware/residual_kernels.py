"""Triton kernels of a ResNet's layers: 3 x 3 convolution, BatchNorm, shortcut and ReLU.

Images are rows of channels: pixel after pixel, image after image (PyTorch's channels_last). Sums
over rows are added to memory that begins as zeros, in no fixed order. A kernel is compiled when it
is first used with new constants (``tl.constexpr``), in about a second.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(place, size: tl.constexpr):
    """Tell whether ``0 <= place < size``, by one comparison."""
    return place.to(tl.uint32) < size


@triton.jit
def convolve(
    images, weight, outputs, sums, shortcut, scale, shift, mean, variance,
    rows, counted, eps, begin, by_out, by_in, by_row, by_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, PADDED: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr,
    STATISTICS: tl.constexpr, NORMALISED: tl.constexpr, SHORTCUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve images.

    With STATISTICS add up how far the first ``counted`` rows are from ``mean``, and the squares of
    that. NORMALISED does what :func:`normalise` does, by statistics that are known; with SHORTCUT
    the shortcut is added at the end, or before what is below 0 is cut off. Element [o, i, r, c] of
    the weight is at ``begin + o by_out + i by_in + r by_row + c by_column``.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = row // OUT_WIDTH % OUT_HEIGHT * STRIDE - 1
    left = row % OUT_WIDTH * STRIDE - 1
    corner = (row // (OUT_HEIGHT * OUT_WIDTH) * HEIGHT + top) * WIDTH + left
    inputs = tl.arange(0, PADDED)
    channels = tl.arange(0, OUTPUTS)
    some = (inputs < INPUTS)[:, None]
    taps = weight + begin + inputs[:, None] * by_in + channels[None, :] * by_out
    total = tl.zeros([BLOCK, OUTPUTS], tl.float32)
    for tap in range(9):
        place = (corner + (tap // 3 * WIDTH + tap % 3)) * INPUTS
        inside = within(top + tap // 3, HEIGHT) & within(left + tap % 3, WIDTH) & (row < rows)
        seen = tl.load(
            images + place[:, None] + inputs[None, :],
            mask=inside[:, None] & (inputs < INPUTS)[None, :],
            other=0.0,
        )
        kernel = tl.load(taps + tap // 3 * by_row + tap % 3 * by_column, mask=some, other=0.0)
        total = tl.dot(seen, kernel.to(seen.dtype), total, input_precision=PRECISION)
    place = row[:, None] * OUTPUTS + channels[None, :]
    there = (row < rows)[:, None]
    if NORMALISED:
        factor = tl.load(scale + channels) / tl.sqrt(tl.load(variance + channels) + eps)
        constant = tl.load(shift + channels) - tl.load(mean + channels) * factor
        total = total * factor[None, :] + constant[None, :]
    if SHORTCUT:
        total += tl.load(shortcut + place, mask=there, other=0.0).to(tl.float32)
    if NORMALISED:
        total = tl.where(total < 0, 0.0, total)  # what is no number stays none
    rounded = total.to(outputs.dtype.element_ty)
    if STATISTICS:
        usual = tl.load(mean + channels)
        if tl.program_id(0) == 0:
            tl.store(sums + 2 * OUTPUTS + channels, usual)
        apart = rounded.to(tl.float32) - usual[None, :]
        apart = tl.where((row < counted)[:, None], apart, 0.0)
        tl.atomic_add(sums + channels, tl.sum(apart, 0), sem="relaxed")
        tl.atomic_add(sums + OUTPUTS + channels, tl.sum(apart * apart, 0), sem="relaxed")
    tl.store(outputs + place, rounded, mask=there)


@triton.jit
def moments(sums, channel, counted, eps, CHANNELS: tl.constexpr):
    """Return mean and unbiased variance of each channel, and two inverse standard deviations.

    The first ``counted`` rows are normalised by the first of these; others, as in evaluation, by
    the second, that of the unbiased variance.
    """
    apart = tl.load(sums + channel) / counted
    variance = tl.load(sums + CHANNELS + channel) / counted - apart * apart
    variance = tl.where(variance < 0, 0.0, variance)
    mean = tl.load(sums + 2 * CHANNELS + channel) + apart
    unbiased = variance * (counted / (counted - 1))
    return mean, unbiased, 1.0 / tl.sqrt(variance + eps), 1.0 / tl.sqrt(unbiased + eps)


@triton.jit
def inverse_of(row, counted, inverse, others, JOINT: tl.constexpr):
    """Return what each row is multiplied by."""
    factor = inverse[None, :]
    if JOINT:
        factor = tl.where((row < counted)[:, None], factor, others[None, :])
    return factor


@triton.jit
def normalise(
    values, shortcut, outputs, sums, scale, shift, running_mean, running_variance,
    rows, counted, eps, momentum,
    CHANNELS: tl.constexpr, SHORTCUT: tl.constexpr, JOINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise rows, add the shortcut, and cut off what is below 0.

    The statistics are those in ``sums``; the running ones move towards them. JOINT: there are rows
    that do not count in the statistics.
    """
    channel = tl.arange(0, CHANNELS)
    mean, unbiased, inverse, others = moments(sums, channel, counted, eps, CHANNELS)
    if tl.program_id(0) == 0:
        old = tl.load(running_mean + channel)
        tl.store(running_mean + channel, old + momentum * (mean - old))
        old = tl.load(running_variance + channel)
        tl.store(running_variance + channel, old + momentum * (unbiased - old))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * CHANNELS + channel[None, :]
    there = (row < rows)[:, None]
    result = tl.load(values + place, mask=there, other=0.0).to(tl.float32)
    result = (result - mean[None, :]) * inverse_of(row, counted, inverse, others, JOINT)
    result = result * tl.load(scale + channel)[None, :] + tl.load(shift + channel)[None, :]
    if SHORTCUT:
        result += tl.load(shortcut + place, mask=there, other=0.0).to(tl.float32)
    result = tl.where(result < 0, 0.0, result)
    tl.store(outputs + place, result.to(outputs.dtype.element_ty), mask=there)


@triton.jit
def passed(normal, outputs, scale, shift, place, there, channel, SHORTCUT: tl.constexpr):
    """Tell where the ReLU let normalised values pass; without SHORTCUT they tell it themselves."""
    if SHORTCUT:
        return tl.load(outputs + place, mask=there, other=0.0) > 0
    scaled = normal * tl.load(scale + channel)[None, :] + tl.load(shift + channel)[None, :]
    return scaled > 0


@triton.jit
def sum_gradients(
    values, outputs, gradient, sums, found, scale, shift, rows, counted, eps,
    CHANNELS: tl.constexpr, SHORTCUT: tl.constexpr, JOINT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add up, by channel, the gradient after the ReLU, and its product with normalised values.

    These are the gradients of shift and scale. JOINT: then those by way of mean and variance follow
    (times the number of rows that count), where the products of the other rows weigh more.
    """
    channel = tl.arange(0, CHANNELS)
    mean, _, inverse, others = moments(sums, channel, counted, eps, CHANNELS)
    plain = tl.zeros([BLOCK, CHANNELS], tl.float32)
    weighted = tl.zeros([BLOCK, CHANNELS], tl.float32)
    by_mean = tl.zeros([BLOCK, CHANNELS], tl.float32)
    by_variance = tl.zeros([BLOCK, CHANNELS], tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        place = row[:, None] * CHANNELS + channel[None, :]
        there = (row < rows)[:, None]
        normal = tl.load(values + place, mask=there, other=0.0).to(tl.float32)
        normal = (normal - mean[None, :]) * inverse_of(row, counted, inverse, others, JOINT)
        coming = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        through = passed(normal, outputs, scale, shift, place, there, channel, SHORTCUT)
        coming = tl.where(through, coming, 0.0)
        plain += coming
        weighted += coming * normal
        if JOINT:
            ratio = (others / inverse)[None, :]
            counts = (row < counted)[:, None]
            by_mean += coming * tl.where(counts, 1.0, ratio)
            share = ratio * ratio * (counted / (counted - 1))
            by_variance += coming * normal * tl.where(counts, 1.0, share)
    tl.atomic_add(found + channel, tl.sum(plain, 0), sem="relaxed")
    tl.atomic_add(found + CHANNELS + channel, tl.sum(weighted, 0), sem="relaxed")
    if JOINT:
        tl.atomic_add(found + 2 * CHANNELS + channel, tl.sum(by_mean, 0), sem="relaxed")
        tl.atomic_add(found + 3 * CHANNELS + channel, tl.sum(by_variance, 0), sem="relaxed")


@triton.jit
def normalise_backward(
    values, outputs, gradient, sums, found, scale, shift, of_values, of_shortcut,
    rows, counted, eps,
    CHANNELS: tl.constexpr, SHORTCUT: tl.constexpr, JOINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring the gradient back to the rows before :func:`normalise`, and to the shortcut.

    The statistics depend on the first ``counted`` rows alone, and on all of these.
    """
    channel = tl.arange(0, CHANNELS)
    mean, _, inverse, others = moments(sums, channel, counted, eps, CHANNELS)
    begin: tl.constexpr = 2 * CHANNELS if JOINT else 0
    by_mean = tl.load(found + begin + channel) / counted
    by_variance = tl.load(found + begin + CHANNELS + channel) / counted
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * CHANNELS + channel[None, :]
    there = (row < rows)[:, None]
    factor = inverse_of(row, counted, inverse, others, JOINT)
    normal = tl.load(values + place, mask=there, other=0.0).to(tl.float32)
    normal = (normal - mean[None, :]) * factor
    coming = tl.load(gradient + place, mask=there, other=0.0)
    through = passed(normal, outputs, scale, shift, place, there, channel, SHORTCUT)
    if SHORTCUT:
        nothing = tl.zeros([BLOCK, CHANNELS], of_shortcut.dtype.element_ty)
        tl.store(of_shortcut + place, tl.where(through, coming, nothing), mask=there)
    result = tl.where(through, coming.to(tl.float32), 0.0)
    of_moments = by_mean[None, :] + normal * by_variance[None, :]
    result -= tl.where((row < counted)[:, None], of_moments, 0.0)
    result *= factor * tl.load(scale + channel)[None, :]
    tl.store(of_values + place, result.to(of_values.dtype.element_ty), mask=there)


@triton.jit
def of_weight(
    images, gradient, found,
    rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add up the gradient of a convolution's weight.

    A program finds some columns of it: a column is a place in the 3 x 3 kernel and an input.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    channels = tl.arange(0, OUTPUTS)
    down, right = column // (3 * INPUTS), column // INPUTS % 3
    shift = (down * WIDTH + right) * INPUTS + column % INPUTS
    wanted = (column < 9 * INPUTS)[None, :]
    total = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        there = (row < rows)[:, None]
        top = row // OUT_WIDTH % OUT_HEIGHT * STRIDE - 1
        left = row % OUT_WIDTH * STRIDE - 1
        corner = (row // (OUT_HEIGHT * OUT_WIDTH) * HEIGHT + top) * WIDTH + left
        inside = within(top[:, None] + down[None, :], HEIGHT)
        inside &= within(left[:, None] + right[None, :], WIDTH) & there & wanted
        place = (corner * INPUTS)[:, None] + shift[None, :]
        seen = tl.load(images + place, mask=inside, other=0.0)
        place = row[:, None] * OUTPUTS + channels[None, :]
        coming = tl.load(gradient + place, mask=there, other=0.0)
        total = tl.dot(tl.trans(coming), seen, total, input_precision=PRECISION)
    place = channels[:, None] * (9 * INPUTS) + column[None, :]
    tl.atomic_add(found + place, total, mask=wanted & (channels >= 0)[:, None], sem="relaxed")
