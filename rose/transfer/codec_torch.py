"""The codec of `rose.transfer.codec` in torch operations, on the device where the values are; the same bytes.

Values are 1-D contiguous tensors of bfloat16 or float32 (or of int16 or int32, as their patterns); a payload is a
(bytes,) uint8 tensor on the same device. A bit stream is worked on as one byte a bit: its ones are found all at once,
and gaps become positions by a cumulative sum, so nothing is decoded one after the other. Host synchronisations:
`encode` waits for the device 7 times, up to 12 with complements, escapes and a comparison with dense; `decode` and
`apply` 5 times, up to 8. Left out: `compose`, `changes` and `info`, which are the CPU's.
"""

from __future__ import annotations

import torch

from rose.transfer import payload as layouts
from rose.transfer.payload import Delta, Dense, Excess, Layout, Plain, Subset

PATTERNS = {2: torch.int16, 4: torch.int32}  # bytes of a value -> signed integers of as many
VALUES = {2: torch.bfloat16, 4: torch.float32}


def encode(new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """(n,) values and the same block's older ones, or None -> payload (bytes,) uint8, as `codec.encode` makes it.

    Raises `ValueError` if the two differ in shape, type or device.
    """
    new = _patterns(new)
    if old is None:
        return _encode_dense(new)
    old = _patterns(old)
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        raise ValueError(f"new values {tuple(new.shape)} {new.dtype} on {new.device}, old values {tuple(old.shape)} "
                         f"{old.dtype} on {old.device}: both must be the same")
    positions = _chosen(new != old)
    differences = (_ordered(new[positions]) - _ordered(old[positions])).to(torch.int64)
    magnitudes = differences.abs()
    which = _chosen(magnitudes > 1)
    excess = magnitudes[which] - 2
    (mask, gaps), (large, large_gaps) = _measure_subsets((new.numel(), positions), (positions.numel(), which))
    coded = _measure_excess(excess)
    delta = layouts.best_delta(new.element_size(), mask, large, coded)
    if not layouts.beats_dense(delta):
        dense, exponents = _dense_layout(new)
        if dense.nbytes < delta.nbytes:
            return _write_dense(dense, new, exponents)
    if isinstance(delta, Plain):
        return _finish(delta, [], new.device)
    streams = [_unary(gaps >> delta.mask.k, delta.mask.unary_bits), _fixed(gaps, delta.mask.k)]
    if delta.large is None:
        return _finish(delta, [*streams, _bits(differences.to(new.dtype).view(torch.uint8))], new.device)
    quotients = excess >> coded.k
    streams += [(differences < 0).to(torch.uint8), _unary(large_gaps >> large.k, large.unary_bits),
                _fixed(large_gaps, large.k), _unary(quotients.clamp(max=layouts.ESCAPE), coded.unary_bits),
                _fixed(excess, coded.k)]
    if coded.escapes:
        streams.append(_fixed(quotients[quotients >= layouts.ESCAPE] - layouts.ESCAPE, coded.escape_bits))
    return _finish(delta, streams, new.device)


def decode(payload: torch.Tensor, old: torch.Tensor | None = None) -> torch.Tensor:
    """The new values (n,), of the type of `old`, or without it bfloat16 or float32.

    Raises `ValueError` if the payload is malformed, or needs the older values and these are missing or don't fit.
    """
    layout = _parse(payload)
    if old is not None:
        new = old.clone(memory_format=torch.contiguous_format)
        _apply(layout, payload, new)
        return new
    if layouts.info(layout).needs_base:
        raise ValueError(f"a payload of kind {layouts.info(layout).kind} needs the older values")
    new = torch.empty(layout.values, dtype=VALUES[layout.width], device=payload.device)
    _apply(layout, payload, new)
    return new


def apply(payload: torch.Tensor, values: torch.Tensor) -> None:
    """Turn the older values into the new ones in place. On `ValueError` they are untouched."""
    _apply(_parse(payload), payload, values)


def _apply(layout: Layout, payload: torch.Tensor, values: torch.Tensor) -> None:
    patterns = _patterns(values)
    if patterns.shape != (layout.values,) or patterns.element_size() != layout.width:
        raise ValueError(f"a payload of {layout.values} values of {layout.width} bytes, but the block is "
                         f"{tuple(values.shape)} {values.dtype}")
    if payload.device != values.device:
        raise ValueError(f"a payload on {payload.device} for values on {values.device}")
    if isinstance(layout, Delta):
        positions, differences = _read_delta(layout, payload)
        moved = _ordered(patterns[positions]) + differences.to(patterns.dtype)
        patterns[positions] = _ordered(moved)
    elif isinstance(layout, Dense):
        patterns.copy_(_read_dense(layout, payload))
    elif layout.kind == layouts.RAW:
        raw = payload[layouts.WORD:layouts.WORD + layout.values * layout.width]
        patterns.copy_((raw if raw.storage_offset() % layout.width == 0 else raw.clone()).view(patterns.dtype))


def _measure_subsets(*chosen: tuple[int, torch.Tensor]) -> list[tuple[Subset, torch.Tensor]]:
    """Of each (total, positions): how to code them, and the gaps to code."""
    gaps = [_steps(_others(total, positions) if Subset(total, positions.numel()).complement else positions)
            for total, positions in chosen]
    sums = torch.stack([steps.sum() for steps in gaps]).tolist()
    firsts = [layouts.first_k(gap_sum, steps.numel()) for gap_sum, steps in zip(sums, gaps)]
    quotients = torch.stack([(steps >> first + i).sum() for first, steps in zip(firsts, gaps)
                             for i in range(layouts.CANDIDATES)]).view(-1, layouts.CANDIDATES).tolist()
    return [(layouts.best_subset(total, positions.numel(), first, quotient), steps)
            for (total, positions), first, quotient, steps in zip(chosen, firsts, quotients, gaps)]


def _measure_excess(excess: torch.Tensor) -> Excess:
    if not excess.numel():
        return Excess(0)
    powers = 1 << torch.arange(32, device=excess.device)
    lengths = torch.bincount(torch.bucketize(excess, powers, right=True), minlength=33)
    k = layouts.excess_k(lengths.tolist())
    quotients = excess >> k
    unary, escapes, largest = torch.stack([
        quotients.clamp(max=layouts.ESCAPE).sum(), (quotients >= layouts.ESCAPE).sum(), quotients.max()]).tolist()
    return layouts.measured_excess(excess.numel(), k, unary, escapes, largest)


def _read_delta(layout: Delta, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (mask, mask_remainders, signs, large, large_remainders, unary, remainders, escapes, end) = layout.offsets
    bits = _bits(payload[mask // 8:])
    start, stop = mask // 8 * 8, end - mask // 8 * 8
    mask, mask_remainders, signs, large, large_remainders, unary, remainders, escapes = (
        at - start for at in (mask, mask_remainders, signs, large, large_remainders, unary, remainders, escapes))
    positions, well = _read_subset(layout.mask, bits[mask:mask_remainders], bits[mask_remainders:signs])
    if layout.large is None:
        _check(well, layout)
        return positions, _packed(bits[signs:stop]).view(PATTERNS[layout.width])
    differences = 1 - 2 * bits[signs:large].to(torch.int64)
    excess = layout.excess
    if not excess.count:
        _check(well, layout)
        return positions, differences
    which, which_well = _read_subset(layout.large, bits[large:large_remainders], bits[large_remainders:unary])
    quotients, quotients_well = _read_quotients(bits[unary:remainders], excess.count)
    escaped = _chosen(quotients >= layouts.ESCAPE)
    if escaped.numel() != excess.escapes:
        raise ValueError(f"a payload of {escaped.numel()} escaped differences, not {excess.escapes}")
    well = well & which_well & quotients_well & (quotients.max() <= layouts.ESCAPE)
    quotients[escaped] += _unfixed(bits[escapes:stop], excess.escapes, excess.escape_bits)
    magnitudes = (quotients << excess.k | _unfixed(bits[remainders:escapes], excess.count, excess.k)) + 2
    _check(well & (magnitudes.max() <= 1 << layout.width * 8 - 1), layout)
    differences[which] *= magnitudes
    return positions, differences


def _check(well: torch.Tensor, layout: Layout) -> None:
    if not well:
        raise ValueError(f"a payload of {layout.values} values whose streams are not what its header says")


def _read_subset(subset: Subset, unary: torch.Tensor, remainders: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions within the block, and whether they are those that were coded: asked later, as asking waits."""
    quotients, well = _read_quotients(unary, subset.coded)
    positions = torch.cumsum((quotients << subset.k | _unfixed(remainders, subset.coded, subset.k)) + 1, 0) - 1
    if subset.coded:
        well = well & (positions[-1] < subset.total)
        positions = positions.clamp(max=subset.total - 1)
    return (_others(subset.total, positions) if subset.complement else positions), well


def _read_quotients(unary: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros before each of `count` ones, and whether the last one ends the stream."""
    ones = _chosen(unary)
    if ones.numel() != count:
        raise ValueError(f"a payload whose unary stream holds {ones.numel()} ones, not {count}")
    return _steps(ones), unary[-1:].all()


def _dense_layout(patterns: torch.Tensor) -> tuple[Dense | Plain, torch.Tensor]:
    exponents = (patterns >> (7 if patterns.element_size() == 2 else 23)).to(torch.int32) & 255
    counts = torch.bincount(exponents, minlength=256).tolist()
    return layouts.best_dense(patterns.element_size(), counts), exponents


def _encode_dense(patterns: torch.Tensor) -> torch.Tensor:
    layout, exponents = _dense_layout(patterns)
    return _write_dense(layout, patterns, exponents)


def _write_dense(layout: Dense | Plain, patterns: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    if isinstance(layout, Plain):
        return _finish(layout, [], patterns.device, patterns.view(torch.uint8))
    planes = []
    if layout.width == 4:
        planes.append(patterns.view(torch.int16)[::2].contiguous().view(torch.uint8))
        patterns = patterns >> 16
    planes.append(((patterns >> 8 & 128) | (patterns & 127)).to(torch.uint8))
    ranks = torch.zeros(256, dtype=torch.int64)
    ranks[list(layout.exponents)] = torch.arange(len(layout.exponents))
    ranks = ranks.to(patterns.device)[exponents]
    return _finish(layout, [_unary(ranks >> layout.k, layout.unary_bits), _fixed(ranks, layout.k)], patterns.device,
                   torch.cat(planes))


def _read_dense(layout: Dense, payload: torch.Tensor) -> torch.Tensor:
    halves, plane, unary, remainders, end = layout.offsets
    bits = _bits(payload[unary // 8:])
    quotients, well = _read_quotients(bits[:remainders - unary], layout.values)
    ranks = quotients << layout.k | _unfixed(bits[remainders - unary:end - unary], layout.values, layout.k)
    if layout.values:
        _check(well & (ranks.max() < len(layout.exponents)), layout)
    table = torch.tensor(list(layout.exponents), dtype=torch.int32).to(payload.device)
    top = payload[plane // 8:unary // 8].to(torch.int32)
    patterns = (top & 128) << 8 | table[ranks] << 7 | top & 127
    if layout.width == 4:
        low = payload[halves // 8:plane // 8].to(torch.int32).view(-1, 2)
        patterns = patterns << 16 | low[:, 1] << 8 | low[:, 0]
    return patterns.to(PATTERNS[layout.width])


def _parse(payload: torch.Tensor) -> Layout:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(f"a payload is one row of bytes, not {tuple(payload.shape)} {payload.dtype}")
    return layouts.parse(payload[:layouts.HEADER_LIMIT].cpu().numpy().tobytes(), payload.numel())


def _finish(layout: Layout, streams: list[torch.Tensor], device: torch.device,
            planes: torch.Tensor | None = None) -> torch.Tensor:
    parts = [torch.frombuffer(bytearray(layout.header), dtype=torch.uint8).to(device)]
    if planes is not None:
        parts.append(planes)
    if streams:
        parts.append(_packed(torch.cat(streams)))
    made = torch.cat(parts)
    return torch.nn.functional.pad(made, (0, layout.nbytes - made.numel()))


def _patterns(values: torch.Tensor) -> torch.Tensor:
    if (values.dim() != 1 or values.dtype not in (*VALUES.values(), *PATTERNS.values()) or not values.is_contiguous()):
        raise ValueError(f"a block is one contiguous row of bfloat16 or float32 values, or of int16 or int32 patterns, "
                         f"not {tuple(values.shape)} {values.dtype}")
    if values.numel() > layouts.MAX_VALUES:
        raise ValueError(f"a block of {values.numel()} values; at most {layouts.MAX_VALUES} are allowed")
    dtype = PATTERNS[values.element_size()]
    if not values.numel():  # its stride may be 0, which can't be viewed
        return values.new_empty(0, dtype=dtype)
    return values.detach().view(dtype)


def _ordered(patterns: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats from their patterns, and back: its own inverse. Differences wrap."""
    info = torch.iinfo(patterns.dtype)
    return patterns ^ (patterns >> info.bits - 1 & info.max)


def _chosen(flags: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(flags).view(-1)


def _others(total: int, positions: torch.Tensor) -> torch.Tensor:
    flags = torch.ones(total, dtype=torch.bool, device=positions.device)
    flags[positions] = False
    return _chosen(flags)


def _steps(ascending: torch.Tensor) -> torch.Tensor:
    """How many items lie between neighbours; before the first one, its own index."""
    return torch.diff(ascending, prepend=ascending.new_full((1,), -1)) - 1


def _unary(quotients: torch.Tensor, size: int) -> torch.Tensor:
    bits = torch.zeros(size, dtype=torch.uint8, device=quotients.device)
    bits[torch.cumsum(quotients + 1, 0) - 1] = 1
    return bits


def _fixed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The `bits` lowest bits of each."""
    shifts = torch.arange(bits, device=values.device)
    return (values[:, None] >> shifts & 1).to(torch.uint8).view(-1)


def _unfixed(stream: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    shifts = torch.arange(bits, device=stream.device)
    return (stream[:count * bits].view(count, bits).to(torch.int64) << shifts).sum(1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """One byte a bit, the least significant first."""
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).view(-1)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Inverse of `_bits`; zeros fill up the last byte."""
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
