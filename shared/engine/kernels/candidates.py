"""Device code that collects candidates for a row's best scores, and chooses among them.

A block has room for candidates in global memory: their scores as bits and, as many words behind
them, their columns, in column order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from shared.engine.kernels.block_order import (
    EACH,
    LOWEST,
    THREADS,
    count_of,
    each,
    key_of,
    numbers,
    range_of,
    ranks_of,
    score_of,
    search,
    spread,
)

TILE = gl.constexpr(4096)  # scores: 16 adjacent ones a thread, whose candidates stay in order
ROOM = gl.constexpr(8192)  # candidates
FEW = gl.constexpr(4096)  # candidates a choice is made among; a tile more has room
ROOM_BYTES = 1 << 16  # a room begins at a multiple of it
STAGES = gl.constexpr(2)

_SAMPLE = gl.constexpr(2048)
_OWN = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [8, 1], [1, 0]))  # 16 adjacent a thread


@gluon.jit
def open_stream(scores):
    """What a block reads tiles of scores through; `scores` is a descriptor of [.., 16] fp32."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    tiles = gl.allocate_shared_memory(gl.float32, [STAGES, THREADS, 16], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    return scores, tiles, full


@gluon.jit
def begin_row(stream, group, length, turn):
    """Begin to read the first tiles of `length` scores from group `group` of 16."""
    for tile in range(gl.minimum(gl.cdiv(length, TILE), STAGES)):
        _bring(stream, group, tile, turn + tile)


@gluon.jit
def _bring(stream, group, tile, turn):
    """Begin to read one tile into the stage that `turn` comes to."""
    scores, tiles, full = stream
    stage = turn % STAGES
    mbarrier.expect(full.index(stage), TILE * 4)
    at = [group + tile * THREADS, 0]
    tma.async_copy_global_to_shared(scores, at, full.index(stage), tiles.index(stage))


@gluon.jit
def estimate(row, length, K: gl.constexpr):
    """A score that, going by a sample, somewhat more than K exceed; NaN: all are wanted."""
    threshold = gl.to_tensor(float("nan"))
    if length >= 4 * _SAMPLE:
        EIGHT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
        column = numbers(8, EIGHT)
        # 256 sectors of eight scores, evenly spread
        sample = gl.load(row + (column // 8 * (length // _SAMPLE) * 8 + column % 8))
        key = key_of(sample.to(gl.int32, bitcast=True))
        expected = _SAMPLE * K / length
        wanted = (expected + 3 * gl.sqrt(expected)).to(gl.int32) + 1
        low, high = range_of(each(gl.min(key, 1)), each(gl.max(key, 1)))
        low, _ = search(key, low, high, gl.to_tensor(_SAMPLE), wanted, wanted // 8)
        threshold = score_of(low - 1)
    return threshold


@gluon.jit
def prefetch_sample(row, length):
    """Bring what `estimate` will read into the L2 cache."""
    if length >= 4 * _SAMPLE:
        at = row + gl.arange(0, THREADS, EACH) * (length // _SAMPLE) * 8
        gl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l",
            [at.to(gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def collect(stream, group, length, threshold, room, turn, K: gl.constexpr):
    """Candidates for the K best of a row whose first tiles are on their way.

    Returns how many there are, at least min(K, length) and at most FEW, and how many tiles the
    block has read.
    """
    _, tiles, full = stream
    num_tiles = gl.cdiv(length, TILE)
    count = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    while tile < num_tiles:
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        x = tiles.index(stage).load(_OWN)
        begin = tile * TILE
        if begin + TILE > length:
            x = gl.where(begin + numbers(16, _OWN) < length, x, float("-inf"))
        before, total = spread(each(gl.sum(_exceeds(x, threshold), 1)))
        if tile + STAGES < num_tiles:
            _bring(stream, group, tile + STAGES, turn)
        place = (room + (count + before)).to(gl.int64)
        _append(place, x, threshold, begin + gl.arange(0, THREADS, EACH) * 16)
        count += total
        tile += 1
        turn += 1
        is_last = tile >= num_tiles
        takes_all = threshold != threshold
        if is_last & takes_all:
            count -= num_tiles * TILE - length  # what stood behind the row's end
        if is_last & (takes_all == 0) & (count < K):
            threshold = gl.to_tensor(float("nan"))
            count = gl.to_tensor(0)
            tile = gl.to_tensor(0)
            begin_row(stream, group, length, turn)
        while count > FEW:
            count, threshold = _thin(room, count, K)
    return count, turn


@gluon.jit
def choose(room, count, K: gl.constexpr):
    """Of the first `count` candidates, FEW at most, the K best.

    Returns the candidates, where each is to go, which of them are the best, and a key that exactly
    as many of them exceed as are certain to be among the best.
    """
    place = numbers(16, _OWN)
    bits = gl.load(room + place)
    columns = gl.load(room + ROOM + place)
    is_live = place < count
    # What is not live has the lowest key and is never above a bound.
    key = gl.where(is_live, key_of(bits), LOWEST)
    lowest = gl.min(gl.where(is_live, key, 2147483647), 1)
    low, high = range_of(each(lowest), each(gl.max(key, 1)))
    low, is_exact = search(key, low, high, gl.to_tensor(count), K, 0)
    bound = gl.where(is_exact, low, low - 1)
    is_best = (key > bound) & is_live
    if is_exact:
        # Those that equal the K-th may be too many: the first ones are taken.
        is_equal = (key == bound) & is_live
        _, num_above = spread(count_of(is_best))
        before, _ = spread(count_of(is_equal))
        is_best = is_best | (is_equal & (ranks_of(is_equal, before, _OWN) < K - num_above))
    before, _ = spread(count_of(is_best))
    return bits, columns, ranks_of(is_best, before, _OWN), is_best, bound


@gluon.jit
def _thin(room, count, K: gl.constexpr):
    """Drop all but the K best of the first FEW candidates; the others move up.

    Returns how many are left, and a threshold that whatever is still wanted exceeds.
    """
    gl.thread_barrier()
    bits, columns, to, is_best, bound = choose(room, FEW, K)
    place = FEW + numbers(16, _OWN)
    other_bits = gl.load(room + place)
    other_columns = gl.load(room + ROOM + place)
    gl.thread_barrier()
    gl.store(room + to, bits, mask=is_best)
    gl.store(room + ROOM + to, columns, mask=is_best)
    moved = place - (FEW - K)
    gl.store(room + moved, other_bits, mask=place < count)
    gl.store(room + ROOM + moved, other_columns, mask=place < count)
    return count - (FEW - K), score_of(bound)


@gluon.jit
def _exceeds(x, threshold):
    """1 where x is above the threshold or one of them is NaN, else 0.

    Written out, like _append_one, because the compiler would keep sixteen predicates alive between
    the two, more than there are, and spend most of its time on that.
    """
    return -gl.inline_asm_elementwise(
        "set.gtu.s32.f32 $0, $1, $2;",
        "=r,f,f",
        [x, gl.full([THREADS, 16], threshold, gl.float32, _OWN)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _append(place, x, threshold, column):
    """Store what exceeds the threshold, and its column, from each thread's place on."""
    threshold = gl.full([THREADS], threshold, gl.float32, EACH)
    by_quarter = gl.permute(gl.reshape(x, [THREADS, 4, 4]), [0, 2, 1])
    even, odd = gl.split(gl.reshape(by_quarter, [THREADS, 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    place = _append_four(place, first, threshold, column)
    place = _append_four(place, second, threshold, column + 4)
    place = _append_four(place, third, threshold, column + 8)
    _append_four(place, fourth, threshold, column + 12)


@gluon.jit
def _append_four(place, x, threshold, column):
    even, odd = gl.split(gl.reshape(x, [THREADS, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    place = _append_one(place, each(first), threshold, column)
    place = _append_one(place, each(second), threshold, column + 1)
    place = _append_one(place, each(third), threshold, column + 2)
    return _append_one(place, each(fourth), threshold, column + 3)


@gluon.jit
def _append_one(place, x, threshold, column):
    """The place behind. A block's room lies within one high word, so low words alone advance."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred exceeds;
        .reg .b64 place;
        .reg .b32 low, high;
        mov.b64 place, $1;
        setp.gtu.f32 exceeds, $2, $3;
        @exceeds st.global.b32 [place], $2;
        @exceeds st.global.b32 [place + 32768], $4;
        mov.b64 {low, high}, place;
        @exceeds add.u32 low, low, 4;
        mov.b64 $0, {low, high};
        }""",
        "=l,l,f,f,r",
        [place, x, threshold, column],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )
