"""Gathers a query and its rows for `sparse_mla_prefill_hopper`: the work of one warpgroup.

Holds the barriers too, by which this warpgroup and the two that multiply pass buffers on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Barriers, by their place in one array. A block of 64 rows arrives in four pieces: the half that is
# multiplied first, the quarters of the other, the rotary part. Its halves become free one by one.
READY = gl.constexpr(0)  # + 4 * block + piece
FREE = gl.constexpr(8)  # + 2 * block + (0 left, 1 right)
PUBLISHED = gl.constexpr(12)  # + block: its probabilities and running maximum are in memory
SUMMED = gl.constexpr(14)  # + warpgroup: its share of the softmax's sum is in memory
QUERY_READY = gl.constexpr(16)
QUERY_FREE = gl.constexpr(17)
NUM_BARRIERS = gl.constexpr(18)

# Eight lanes read 128 bytes of a row, four rows a warp.
_GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def initialise(bars):
    """Before the warpgroups part."""
    for number in gl.static_range(8):
        mbarrier.init(bars.index(READY + number), count=128)
        mbarrier.init(bars.index(FREE + number), count=1)
    mbarrier.init(bars.index(QUERY_READY), count=1)
    mbarrier.init(bars.index(QUERY_FREE), count=2)


@gluon.jit
def gather(q, k, bars, queries, rows, chosen, num_queries, topk, pairs):
    """Brings each query and its rows into shared memory; a place without a row becomes zeros."""
    place = gl.arange(0, 64, gl.SliceLayout(1, _GATHER))
    phase = 1  # the first wait for a free buffer must not block
    turn = 1
    for number in range(gl.program_id(0), num_queries, gl.num_programs(0)):
        ids = chosen + gl.cast(number, gl.int64) * topk
        mbarrier.wait(bars.index(QUERY_FREE), turn)
        ready = bars.index(QUERY_READY)
        mbarrier.expect(ready, 64 * 576 * 2)
        tma.async_copy_global_to_shared(queries[0], [number * 64, 0], ready, q[0].index(0))
        tma.async_copy_global_to_shared(queries[0], [number * 64, 256], ready, q[1].index(0))
        tma.async_copy_global_to_shared(queries[1], [number * 64, 512], ready, q[2].index(0))
        even = gl.load(ids + place, mask=place < topk, other=-1)
        odd = gl.load(ids + 64 + place, mask=64 + place < topk, other=-1)
        for i in range(pairs):
            even_rows, has_even = rows + gl.expand_dims(even.to(gl.int64) * 576, 1), even >= 0
            odd_rows, has_odd = rows + gl.expand_dims(odd.to(gl.int64) * 576, 1), odd >= 0
            # Numbers are read a turn ahead: their latency must not delay the rows.
            after = (i + 1) * 128 + place
            even = gl.load(ids + after, mask=after < topk, other=-1)
            odd = gl.load(ids + 64 + after, mask=64 + after < topk, other=-1)
            _copy_block((k[0], k[1], k[2]), 0, 0, even_rows, has_even, bars, phase)
            _copy_block((k[1], k[0], k[2]), 1, 256, odd_rows, has_odd, bars, phase)
            phase ^= 1
        turn ^= 1


@gluon.jit
def _copy_block(k, block: gl.constexpr, first: gl.constexpr, base, has_row, bars, phase):
    """k: the half at column `first` of the row, the other half, the rotary part."""
    second: gl.constexpr = 256 - first
    ready: gl.constexpr = READY + 4 * block
    free: gl.constexpr = FREE + 2 * block
    mbarrier.wait(bars.index(free + first // 256), phase)
    _copy(k[0].index(block), base, first, 256, has_row, bars.index(ready))
    mbarrier.wait(bars.index(free + second // 256), phase)
    half = k[1].index(block)
    _copy(half.slice(0, 128, dim=1), base, second, 128, has_row, bars.index(ready + 1))
    _copy(half.slice(128, 128, dim=1), base, second + 128, 128, has_row, bars.index(ready + 2))
    _copy(k[2].index(block), base, 512, 64, has_row, bars.index(ready + 3))


@gluon.jit
def _copy(target, base, first: gl.constexpr, count: gl.constexpr, has_row, ready):
    column = first + gl.arange(0, count, gl.SliceLayout(0, _GATHER))
    source = base + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(target, source, mask=gl.expand_dims(has_row, 1))
    async_copy.mbarrier_arrive(ready, increment_count=False)
