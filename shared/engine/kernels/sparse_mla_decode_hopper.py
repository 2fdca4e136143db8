"""Device code of `sparse_mla_decode`: one block a query and split, three groups of four warps.

One group gathers rows and turns them into fp16, one computes scores, probabilities and the first
half of the output, one the second half. Tiles of 64 rows pass between them in a ring of two. fp16
holds e4m3 values times a power of two exactly and takes two instructions for two values, where
bf16 takes five: hence the contract's bound on rows.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE_ROWS = 64
WARPS = 4  # of a group
REGISTERS = 168  # of a thread at the block's beginning; then the groups trade theirs

_TILE = gl.constexpr(TILE_ROWS)
_LOWEST = gl.constexpr(-1e30)  # finite: the difference of two of them is a number
_LN_2 = gl.constexpr(math.log(2))
_SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
_VALUES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
)
_P_READY, _P_READ, _SUM_READY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit(do_not_specialize=["first_hot", "top_k", "span", "num_splits"])
def attend(
    query,  # [num_queries, NUM_HEADS, 576] bf16
    rows,  # [num_rows, 656] e4m3
    hot_rows,  # [num_hot_rows, 656] e4m3
    first_hot,  # their first number
    row_ids,  # [num_queries, top_k]
    out,  # [num_queries * num_splits, NUM_HEADS, 512] fp32 if split, else bf16
    lse,  # [num_queries * num_splits, NUM_HEADS]
    scale_log2,
    top_k,
    span,  # places of a split
    num_splits,
    NUM_HEADS: gl.constexpr,
    WIDTH: gl.constexpr,  # a power of two, span or more
):
    """One query's attention over one split of its places; a block's program."""
    item = gl.program_id(0).to(gl.int64)
    query += item // num_splits * (NUM_HEADS * 576)
    out += item * (NUM_HEADS * 512)
    lse += item * NUM_HEADS
    begin = (item % num_splits).to(gl.int32) * span
    row_ids += item // num_splits * top_k + begin
    num_places = gl.minimum(top_k - begin, span)
    num_tiles = _tiles_in_use(row_ids, num_places, WIDTH)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Latent columns 0..255 and 256..511, and the rope columns; two tiles of rows.
    q = (
        gl.allocate_shared_memory(gl.float16, [64, 256], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [64, 256], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED),
    )
    k = (
        gl.allocate_shared_memory(gl.float16, [2, _TILE, 256], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [2, _TILE, 256], SWIZZLED),
        gl.allocate_shared_memory(gl.float16, [2, _TILE, 64], SWIZZLED),
    )
    bias = gl.allocate_shared_memory(gl.float32, [2, _TILE], FLAT)  # -inf where there is no row
    p = gl.allocate_shared_memory(gl.float16, [64, _TILE], SWIZZLED)
    heads = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)  # decay of earlier p, sum of p
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_read = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    states = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_read.index(i), count=2)
    for i in gl.static_range(3):
        mbarrier.init(states.index(i), count=1)
    ring = (k, bias, k_ready, k_read)
    places = (rows, hot_rows, first_hot, row_ids, num_places)
    first_half = (query, q, ring, p, heads, states, out, lse, scale_log2, num_tiles, NUM_HEADS)
    gl.warp_specialize(
        [
            (_first_half, first_half),
            (_second_half, (ring, p, heads, states, out, num_tiles, NUM_HEADS)),
            (_gather, (ring, places, num_tiles)),
        ],
        [4, 4],
        # A value half needs 128 for its sums, a tile in flight 80; 208 are left for the scores.
        [160, 136],
    )


@gluon.jit
def _tiles_in_use(row_ids, num_places, WIDTH: gl.constexpr):
    """How many tiles there are up to the last place that has a row."""
    place = gl.arange(0, WIDTH, gl.BlockedLayout([4], [32], [4], [0]))
    row = gl.load(row_ids + place, mask=place < num_places, other=-1)
    return (gl.max(gl.where(row >= 0, place, -1), 0) + _TILE) // _TILE


@gluon.jit
def _first_half(query, q, ring, p, heads, states, out, lse, scale_log2, num_tiles, NUM_HEADS):
    """Scores and probabilities of each tile, and the first half of the output."""
    HEADS: gl.constexpr = gl.SliceLayout(1, _SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, _SCORES)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_VALUES, k_width=2)
    k, bias, k_ready, k_read = ring
    _load_query(query, q, heads.index(0), NUM_HEADS)
    fence_async_shared()
    scale = gl.expand_dims(heads.index(0).load(HEADS) * scale_log2, 1)
    top = gl.full([64], _LOWEST, gl.float32, HEADS)
    total = gl.zeros([64], gl.float32, HEADS)
    acc = gl.zeros([64, 256], gl.float32, _VALUES)
    for i in range(num_tiles):
        stage = i % 2
        mbarrier.wait(k_ready.index(stage), (i // 2) & 1)
        # For both halves, and here: the gathering warps would wait for loads in flight.
        fence_async_shared()
        s = gl.zeros([64, _TILE], gl.float32, _SCORES)
        for part in gl.static_range(3):
            columns = k[part].index(stage).permute((1, 0))
            s = warpgroup_mma(q[part], columns, s, use_acc=part > 0, is_async=True)
        column_bias = gl.expand_dims(bias.index(stage).load(COLUMNS), 0)
        s = warpgroup_mma_wait(0, deps=[s]) * scale + column_bias
        before = top
        top = gl.maximum(top, gl.max(s, 1))
        decay = gl.exp2(before - top)
        e = gl.exp2(s - gl.expand_dims(top, 1))
        half = e.to(gl.float16)
        mbarrier.wait(states.index(_P_READ), (i & 1) ^ 1)
        p.store(half)
        heads.index(0).store(decay)
        fence_async_shared()
        mbarrier.arrive(states.index(_P_READY), count=1)
        total = total * decay + gl.sum(e, 1)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, _VALUES)), 1)
        half = gl.convert_layout(half, P)
        acc = warpgroup_mma(half, k[0].index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(k_read.index(stage), count=1)
    heads.index(1).store(total)
    mbarrier.arrive(states.index(_SUM_READY), count=1)
    _store_lse(top, total, lse, NUM_HEADS)
    _store_half(acc, gl.convert_layout(total, gl.SliceLayout(1, _VALUES)), out, 0, NUM_HEADS)


@gluon.jit
def _second_half(ring, p, heads, states, out, num_tiles, NUM_HEADS):
    """The second half of the output."""
    HEADS: gl.constexpr = gl.SliceLayout(1, _VALUES)
    k, _, _, k_read = ring
    acc = gl.zeros([64, 256], gl.float32, _VALUES)
    for i in range(num_tiles):
        stage = i % 2
        mbarrier.wait(states.index(_P_READY), i & 1)
        acc = acc * gl.expand_dims(heads.index(0).load(HEADS), 1)
        acc = warpgroup_mma(p, k[1].index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(states.index(_P_READ), count=1)
        mbarrier.arrive(k_read.index(stage), count=1)
    mbarrier.wait(states.index(_SUM_READY), 0)
    _store_half(acc, heads.index(1).load(HEADS), out, 256, NUM_HEADS)


@gluon.jit
def _gather(ring, places, num_tiles):
    """Rows of each tile as fp16; zeros where there is none."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    k, bias, k_ready, k_read = ring
    rows, hot_rows, first_hot, row_ids, num_places = places
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, CODES)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROPE)), 0)
    place = gl.arange(0, _TILE, gl.SliceLayout(1, CODES))
    row = gl.load(row_ids + place, mask=place < num_places, other=-1)
    for i in range(num_tiles):
        stage = i % 2
        live = row >= 0
        row = row.to(gl.int64)
        start = gl.where(row < first_hot, rows + row * 656, hot_rows + (row - first_hot) * 656)
        scales = (start + 512).to(gl.pointer_type(gl.float32), bitcast=True)
        s0 = gl.load(scales, mask=live, other=0.0)
        s1 = gl.load(scales + 1, mask=live, other=0.0)
        s2 = gl.load(scales + 2, mask=live, other=0.0)
        s3 = gl.load(scales + 3, mask=live, other=0.0)
        v0 = _load_columns(start, column, live)
        v1 = _load_columns(start + 128, column, live)
        v2 = _load_columns(start + 256, column, live)
        v3 = _load_columns(start + 384, column, live)
        rope = (start + 528).to(gl.pointer_type(gl.bfloat16), bitcast=True)
        rope = gl.convert_layout(rope, gl.SliceLayout(1, ROPE), assert_trivial=True)
        has_rope = gl.convert_layout(live, gl.SliceLayout(1, ROPE), assert_trivial=True)
        r = _load_columns(rope, rope_column, has_rope)
        following = place + (i + 1) * _TILE
        row = gl.load(row_ids + following, mask=following < num_places, other=-1)
        mbarrier.wait(k_read.index(stage), ((i // 2) & 1) ^ 1)
        bias.index(stage).store(gl.where(live, 0.0, -float("inf")))
        first = k[0].index(stage)
        second = k[1].index(stage)
        first.slice(0, 128, dim=1).store(_scaled(v0, s0))
        first.slice(128, 128, dim=1).store(_scaled(v1, s1))
        second.slice(0, 128, dim=1).store(_scaled(v2, s2))
        second.slice(128, 128, dim=1).store(_scaled(v3, s3))
        k[2].index(stage).store(r.to(gl.float32).to(gl.float16))
        mbarrier.arrive(k_ready.index(stage), count=1)


@gluon.jit
def _load_columns(start, column, live):
    places = gl.expand_dims(start, 1) + column
    return gl.load(places, mask=gl.expand_dims(live, 1), other=0.0)


@gluon.jit
def _scaled(codes, scale):
    return codes.to(gl.float16) * gl.expand_dims(scale.to(gl.float16), 1)


@gluon.jit
def _load_query(query, q, scales, NUM_HEADS):
    """The query in fp16, each head times a power of two; the inverse goes to scales."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, L)), 0)
    rope_column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    places = query + head * 576
    a = gl.load(places + column, mask=head < NUM_HEADS, other=0.0)
    b = gl.load(places + 256 + column, mask=head < NUM_HEADS, other=0.0)
    c = gl.load(places + 512 + rope_column, mask=head < NUM_HEADS, other=0.0)
    top = gl.max(gl.maximum(_magnitude(a), _magnitude(b)), 1)
    top = gl.maximum(top, gl.max(_magnitude(c), 1)).to(gl.int32)
    # The exponent of the greatest value becomes 14; the factor stays finite for tiny ones.
    exponent = gl.minimum(gl.maximum(top >> 7, 32), 240)
    scales.store(_power_of_two(exponent - 14))
    factor = gl.expand_dims(_power_of_two(268 - exponent), 1)
    q[0].store((a.to(gl.float32) * factor).to(gl.float16))
    q[1].store((b.to(gl.float32) * factor).to(gl.float16))
    q[2].store((c.to(gl.float32) * factor).to(gl.float16))


@gluon.jit
def _magnitude(x):
    """Bits of |x|, which are ordered like it."""
    return x.to(gl.int16, bitcast=True) & 0x7FFF


@gluon.jit
def _power_of_two(exponent):
    """The fp32 number with this biased exponent."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _store_lse(top, total, lse, NUM_HEADS):
    head = gl.arange(0, 64, gl.SliceLayout(1, _SCORES))
    value = gl.where(total == 0, -float("inf"), (top + gl.log2(total)) * _LN_2)
    gl.store(lse + head, value, mask=head < NUM_HEADS)


@gluon.jit
def _store_half(acc, total, out, first: gl.constexpr, NUM_HEADS):
    head = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _VALUES)), 1)
    column = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, _VALUES)), 0) + first
    acc = acc * gl.expand_dims(gl.where(total == 0, 0.0, 1.0 / total), 1)
    value = acc.to(out.dtype.element_ty)
    gl.store(out + head * 512 + column, value, mask=head < NUM_HEADS)
