"""Device code for blocks of 256 threads: sums over threads, ranks, search in integer order.

Scores are compared as integers of the same order, `keys`: -0 equals 0, NaN is below everything.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = gl.constexpr(8)
THREADS = gl.constexpr(256)
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # one element a thread
LOWEST = gl.constexpr(-2147483648)  # the key of NaN


@gluon.jit
def key_of(bits):
    """fp32 as an integer of the same order."""
    key = gl.where(bits >= 0, bits, LOWEST - bits)
    return gl.where((bits & 0x7FFFFFFF) <= 0x7F800000, key, LOWEST)


@gluon.jit
def score_of(key):
    """The fp32 of a key; NaN for keys that are no number's."""
    bits = gl.where(key >= 0, key, LOWEST - key)
    return gl.where(key == LOWEST, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def numbers(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """[threads, COUNT]: numbers from 0, COUNT adjacent ones in each thread."""
    thread = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT)), 1)
    return thread * COUNT + gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def each(x):
    """[threads], one element a thread, in the layout that all such tensors share."""
    return gl.convert_layout(x, EACH, assert_trivial=True)


@gluon.jit
def count_of(is_member):
    """How many of [threads, n] each thread has."""
    return each(gl.sum(is_member.to(gl.int32), 1))


@gluon.jit
def total_of(x):
    """The sum over all threads."""
    return gl.sum(gl.sum(_of_all_warps(gl.sum(_by_warp(x), 1)), 1), 0)


@gluon.jit
def range_of(smallest, largest):
    """The least and the greatest over all threads."""
    least = gl.min(gl.min(_of_all_warps(gl.min(_by_warp(smallest), 1)), 1), 0)
    return least, gl.max(gl.max(_of_all_warps(gl.max(_by_warp(largest), 1)), 1), 0)


@gluon.jit
def spread(x):
    """Of one number a thread: the sum over the threads before, and the total."""
    ALL: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
    by_warp = _by_warp(x)
    in_warp = gl.associative_scan(by_warp, 1, _add) - by_warp
    sums = _of_all_warps(gl.sum(by_warp, 1))
    warp = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(1, ALL)) // 32, 1)
    other = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(0, ALL)), 0)
    before = each(gl.sum(gl.where(other < warp, sums, 0), 1))
    total = gl.sum(gl.sum(sums, 1), 0)
    return before + each(gl.reshape(in_warp, [THREADS])), total


@gluon.jit
def ranks_of(is_member, before, LAYOUT: gl.constexpr):
    """[threads, 16]: how many members come earlier; `before` those of earlier threads."""
    one = gl.full([16], 1, gl.int32, gl.SliceLayout(0, LAYOUT))
    bit = gl.expand_dims(one << gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    members = gl.expand_dims(gl.sum(gl.where(is_member, bit, 0), 1), 1)
    earlier = gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [members & (bit - 1)], dtype=gl.int32, is_pure=True, pack=1
    )
    before = gl.convert_layout(before, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.expand_dims(before, 1) + earlier


@gluon.jit
def search(key, low, high, num_from_low, wanted, slack):
    """A key that `wanted` to `wanted + slack` members reach, or else the wanted-th largest itself.

    All `num_from_low` members reach `low`, none exceeds `high`. Returns the key, and whether it is
    the wanted-th largest because no other key would do.
    """
    num_above_high = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    is_exact = low >= high
    is_done = is_exact
    while is_done == 0:
        # Where it would be if members lay evenly; every third time the middle, lest it creep.
        span = (num_from_low - num_above_high).to(gl.float32)
        part = (num_from_low - wanted).to(gl.float32) / span
        step = ((high.to(gl.float32) - low.to(gl.float32)) * part).to(gl.int64)
        guess = gl.minimum(low.to(gl.int64) + gl.maximum(step, 1), high.to(gl.int64)).to(gl.int32)
        middle = (low | high) - ((low ^ high) >> 1)
        probe = gl.where(turn == 2, middle, guess)
        turn = gl.where(turn == 2, 0, turn + 1)
        num = total_of(count_of(key >= probe))
        is_enough = num >= wanted
        low = gl.where(is_enough, probe, low)
        num_from_low = gl.where(is_enough, num, num_from_low)
        high = gl.where(is_enough, high, probe - 1)
        num_above_high = gl.where(is_enough, num_above_high, num)
        is_exact = low >= high
        is_done = is_exact | (is_enough & (num <= wanted + slack))
    return low, is_exact


@gluon.jit
def _of_all_warps(x):
    """[1, warps]: one value of each warp, known to every thread."""
    ALL: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, ALL)), 0)


@gluon.jit
def _by_warp(x):
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    return gl.convert_layout(gl.reshape(x, [WARPS, 32]), LANES, assert_trivial=True)


@gluon.jit
def _add(left, right):
    return left + right
