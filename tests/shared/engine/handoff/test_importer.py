"""Decode pulls KV out of other processes, and gets the right rows or an error."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from shared import farspan_pb2 as pb
from shared.engine.handoff.importer import KvImporter, StaleRef
from shared.errors import ConfigError, Overloaded, WorkerLost
from tests.shared.engine.handoff.kv_peers import Held, Pages, Peer, pull_while_it_changes

LOCAL = {"UCX_NET_DEVICES": "lo"}
TCP = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}  # what two hosts without RDMA do


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Peer]]:
    """Four rank processes for the tests that leave them alive."""
    peers = [Peer(LOCAL) for _ in range(4)]
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def use_ucx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    yield


def exported(peers: list[Peer], held: Held) -> list[pb.RankRegions]:
    return [peers[rank].export(held, rank) for rank in range(held.size)]


def importer_for(held: Held, *, slots: int = 8, num_lanes: int = 1) -> KvImporter:
    layout = held.layout
    slot_bytes = 64 * layout.row_bytes * layout.num_mla_layers
    slot_bytes += layout.index_page_bytes * layout.num_index_layers
    return KvImporter(
        "decode", layout, staging_bytes=slots * slot_bytes * num_lanes, num_lanes=num_lanes
    )


def pulls_right(importer: KvImporter, held: Held, regions: list[pb.RankRegions]) -> bool:
    pages = Pages(held)
    importer.pull(pages.request(regions))
    return pages.holds(0, held.num_tokens)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"


def over(network: str) -> dict[str, str]:
    return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": network}


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a cable; each name is that of its interface, too."""
    names = tuple(f"farspan{os.getpid() % 100000}{end}" for end in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth",
           "peer", "name", names[1], "netns", names[1])  # fmt: skip
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(
            f"ip {' '.join(arguments)}: {done.stderr.strip()}. This test needs CAP_NET_ADMIN and"
            " iproute2; where they cannot be had, set FARSPAN_NO_NETNS=1"
        )


@pytest.mark.usefixtures("use_ucx")
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "fp32"])
@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sequence_comes_over_in_token_order_chunk_by_chunk(
    ranks: list[Peer], size: int, interleave: int, kv_format: str
) -> None:
    """Every layout gives the same host tier; rows past the end keep what was there.

    The staging holds two effective blocks, so each pull takes several pieces.
    """
    held = Held(size, interleave, kv_format, num_tokens=641 if size > 1 else 345)
    regions = exported(ranks, held)
    importer = importer_for(held, slots=2 * size)
    pages = Pages(held)

    importer.pull(pages.request(regions, last_token=128))
    assert pages.holds(0, 128)
    importer.pull(pages.request(regions, first_token=128, last_token=320))
    assert pages.holds(0, 320)
    importer.pull(pages.request(regions, first_token=320))
    assert pages.holds(0, held.num_tokens)


@pytest.mark.usefixtures("use_ucx")
@pytest.mark.parametrize("interleave", [1, 64])
def test_only_the_missing_pages_move(ranks: list[Peer], interleave: int) -> None:
    """A delta starts at any page, also inside an effective block; earlier pages are left alone."""
    held = Held(2, interleave, num_tokens=641)
    regions = exported(ranks, held)
    pages, importer = Pages(held), importer_for(held)
    delta = importer.pull(pages.request(regions, first_token=576))

    whole = importer.pull(Pages(held).request(regions))

    assert pages.holds(576, 641)
    assert delta.num_bytes < whole.num_bytes / 2
    assert importer.counts == delta + whole


@pytest.mark.usefixtures("use_ucx")
def test_pulls_of_several_threads_do_not_mix(ranks: list[Peer]) -> None:
    """Eight pulls on two lanes, from ranks with different contents."""
    one, two = Held(1, 64, seed=1), Held(1, 64, seed=2)
    sources = [(one, [ranks[0].export(one, 0)]), (two, [ranks[1].export(two, 0)])] * 4
    importer = importer_for(one, slots=2, num_lanes=2)
    pulls = [(Pages(held), regions) for held, regions in sources]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pull: importer.pull(pull[0].request(pull[1])), pulls))

    assert all(pages.holds(0, pages.held.num_tokens) for pages, _ in pulls)


@pytest.mark.usefixtures("use_ucx")
@pytest.mark.parametrize("interleave", [1, 64])
def test_a_block_given_to_another_request_is_refused(ranks: list[Peer], interleave: int) -> None:
    """Also when a single rank has moved on, and before anything reaches the pages."""
    held = Held(2, interleave)
    regions = exported(ranks, held)
    last = held.blocks[1]
    ranks[1].ask("set_word", 1 + last.block_id, last.generation + 1)
    pages = Pages(held)

    with pytest.raises(StaleRef, match="another request"):
        importer_for(held).pull(pages.request(regions))

    assert pages.holds(0, 0)


@pytest.mark.usefixtures("use_ucx")
def test_a_pull_in_another_epoch_is_refused(ranks: list[Peer]) -> None:
    """The offer was made by an earlier life of the worker."""
    held = Held(2, 64)
    regions = exported(ranks, held)
    pages = Pages(held)

    with pytest.raises(StaleRef, match="epoch"):
        importer_for(held).pull(pages.request(regions, epoch=held.epoch + 1))

    assert pages.holds(0, 0)


@pytest.mark.usefixtures("use_ucx")
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([pb.BlockRef(block_id=12, generation=5)] * 5, id="id-outside-the-pool"),
        pytest.param([pb.BlockRef(block_id=3)] * 5, id="no-generation"),
        pytest.param([pb.BlockRef(block_id=3, generation=1 << 63)] * 5, id="unheard-of-generation"),
        pytest.param([pb.BlockRef(block_id=3, generation=5)], id="too-few"),
    ],
)
def test_references_that_name_no_block_are_refused(
    ranks: list[Peer], blocks: list[pb.BlockRef]
) -> None:
    """A peer that trusted such ids answered with another request's text (vLLM 52234)."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    pages = Pages(held)

    with pytest.raises(StaleRef):
        importer_for(held).pull(pages.request(regions, blocks=blocks))

    assert pages.holds(0, 0)


@pytest.mark.usefixtures("use_ucx")
def test_rows_of_two_owners_never_pass_as_one_block(ranks: list[Peer]) -> None:
    """While the owner reuses the block all the time, what is accepted is whole and as asked for.

    The block is 17 MB, so that reuse falls into reads; the second check must catch each of those.
    """
    held = Held(1, 64, num_tokens=64, num_blocks=2, num_mla_layers=8, row_bytes=32768)
    regions = exported(ranks, held)
    importer = importer_for(held, slots=1)
    pages = Pages(held)
    ranks[0].ask("churn", held.blocks[0].block_id)

    accepted, refused = pull_while_it_changes(
        ranks[0], importer, pages, regions, wanted=3, within_s=60
    )

    assert accepted >= 3
    assert refused >= 3


@pytest.mark.usefixtures("use_ucx")
def test_an_offer_that_contradicts_an_earlier_one_is_refused(ranks: list[Peer]) -> None:
    """Pools live as long as their process, so moved pools mean a mistaken or forged offer."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    importer = importer_for(held)
    importer.pull(Pages(held).request(regions))
    moved = pb.RankRegions.FromString(regions[0].SerializeToString())
    moved.mla_base += 64

    with pytest.raises(WorkerLost, match="other regions"):
        importer.pull(Pages(held).request([moved]))


@pytest.mark.usefixtures("use_ucx")
@pytest.mark.parametrize(
    ("name", "value"),
    [("agent_metadata", b"junk"), ("agent_name", "someone-else"), ("mla_base", 4096)],
)
def test_an_offer_of_memory_nobody_registered_is_refused(
    ranks: list[Peer], name: str, value: object
) -> None:
    """NIXL knows what was registered; its refusal is an error of this request alone."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    wrong = pb.RankRegions.FromString(regions[0].SerializeToString())
    setattr(wrong, name, value)
    importer = importer_for(held)

    with pytest.raises(WorkerLost):
        importer.pull(Pages(held).request([wrong]))

    pages = Pages(held)
    importer_for(held).pull(pages.request(regions))
    assert pages.holds(0, held.num_tokens)


@pytest.mark.usefixtures("use_ucx")
def test_pools_in_memory_of_another_kind_are_refused_by_name(ranks: list[Peer]) -> None:
    """Nothing but host and GPU memory holds KV."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    regions[0].memory_kind = "FILE"

    with pytest.raises(ConfigError, match="FILE"):
        importer_for(held).pull(Pages(held).request(regions))


@pytest.mark.usefixtures("use_ucx")
def test_host_memory_offered_as_a_gpus_is_refused(ranks: list[Peer]) -> None:
    """Addresses of one kind taken for the other's would be read by the wrong means."""
    held = Held(1, 64)
    regions = exported(ranks, held)
    regions[0].memory_kind = "VRAM"

    with pytest.raises(WorkerLost, match="did not register"):
        importer_for(held).pull(Pages(held).request(regions))


@pytest.mark.parametrize("ucx", [LOCAL, TCP], ids=["same-host", "tcp"])
def test_a_killed_rank_is_lost_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, ucx: dict[str, str]
) -> None:
    """The death of one prefill rank ends its own handoffs, in bounded time, and nothing else."""
    for name, value in ucx.items():
        monkeypatch.setenv(name, value)
    held = Held(1, 64)
    with closing(Peer(ucx)) as dying, closing(Peer(ucx)) as living:
        doomed, healthy = [dying.export(held, 0)], [living.export(held, 0)]
        importer = importer_for(held)
        importer.pull(Pages(held).request(doomed))
        dying.signal(signal.SIGKILL)

        for _ in range(2):
            with pytest.raises(WorkerLost):
                importer.pull(Pages(held).request(doomed, deadline_s=10.0))
        pages = Pages(held)
        importer.pull(pages.request(healthy))

        assert pages.holds(0, held.num_tokens)
        assert importer.num_quarantined_lanes == 0


def test_a_stopped_rank_times_out_and_its_late_bytes_touch_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The read of a stopped process cannot be cancelled: it lands when the process goes on.

    Its lane is out of use until then; the other lane serves other pulls meanwhile, byte for byte
    right.
    """
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    big = {"num_tokens": 640, "num_mla_layers": 4, "row_bytes": 8192}  # 21 MB: some 20 ms of TCP
    slow, other = Held(1, 64, seed=1, **big), Held(1, 64, seed=2, **big)
    with closing(Peer(TCP)) as stopping, closing(Peer(TCP)) as living:
        stopped, healthy = [stopping.export(slow, 0)], [living.export(other, 0)]
        importer = importer_for(slow, slots=10, num_lanes=2)
        importer.pull(Pages(slow).request(stopped))
        importer.pull(Pages(other).request(healthy))
        pages, read_before = Pages(slow), importer.counts
        with ThreadPoolExecutor(1) as pool:
            pull = pool.submit(importer.pull, pages.request(stopped, deadline_s=1.0))
            wait_until(lambda: importer.counts != read_before)  # the first check is done
            stopping.signal(signal.SIGSTOP)
            with pytest.raises(WorkerLost, match="in time"):
                pull.result(20)

        assert importer.num_quarantined_lanes == 1
        assert pulls_right(importer, other, healthy)
        stopping.signal(signal.SIGCONT)
        wait_until(
            lambda: pulls_right(importer, other, healthy) and importer.num_quarantined_lanes == 0
        )
        assert pages.holds(0, 0)
        assert pulls_right(importer, slow, stopped)


def test_with_all_lanes_quarantined_a_pull_is_refused_not_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reusing the memory could give wrong answers; the gateway can place the request anew."""
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    held, other = Held(1, 64, seed=1), Held(1, 64, seed=2)
    with closing(Peer(TCP)) as stopping, closing(Peer(TCP)) as living:
        stopped, healthy = [stopping.export(held, 0)], [living.export(other, 0)]
        importer = importer_for(held, num_lanes=1)
        importer.pull(Pages(held).request(stopped))
        stopping.signal(signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="in time"):
            importer.pull(Pages(held).request(stopped, deadline_s=0.3))

        with pytest.raises(Overloaded, match="quarantined"):
            importer.pull(Pages(other).request(healthy, deadline_s=0.3))
        stopping.signal(signal.SIGKILL)

        assert pulls_right(importer, other, healthy)


def test_pulls_cross_between_network_namespaces() -> None:
    """Two hosts in all that matters to UCX: other interfaces, other addresses, TCP alone."""
    if os.environ.get("FARSPAN_NO_NETNS") == "1":
        pytest.skip("FARSPAN_NO_NETNS=1: network namespaces cannot be made here")
    held = Held(2, 1, num_tokens=641)
    with two_networks() as (here, there), ExitStack() as stack:
        ranks = [stack.enter_context(closing(Peer(over(there), network=there))) for _ in range(2)]
        decode = stack.enter_context(closing(Peer(over(here), network=here)))
        regions = [rank.SerializeToString() for rank in exported(ranks, held)]

        assert decode.ask("pull", held, regions, 641)


def test_without_a_network_device_the_agent_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that cannot move KV must not start."""
    monkeypatch.setenv("UCX_NET_DEVICES", "no-such-device")

    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        importer_for(Held(1, 64))


def test_without_nixl_the_agent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no fallback: slow KV by another way would hide a broken installation."""
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)

    with pytest.raises(ConfigError, match="nixl_cu13"):
        importer_for(Held(1, 64))


@pytest.mark.usefixtures("use_ucx")
def test_a_lane_too_small_for_one_effective_block_is_a_wrong_setting(ranks: list[Peer]) -> None:
    """No waiting helps, so it is not an overload."""
    held = Held(4, 1)
    regions = exported(ranks, held)

    with pytest.raises(ConfigError, match="4 ranks"):
        importer_for(held, slots=3).pull(Pages(held).request(regions))


@pytest.mark.parametrize("ucx", [LOCAL, TCP], ids=["same-host", "tcp"])
def test_a_decode_worker_that_dies_while_pulling_leaves_its_ranks_serving(
    monkeypatch: pytest.MonkeyPatch, ucx: dict[str, str]
) -> None:
    """A rank serves many decode workers; one death must not end its poller or its process."""
    for name, value in ucx.items():
        monkeypatch.setenv(name, value)
    held = Held(1, 64, num_tokens=640, num_mla_layers=4, row_bytes=8192)
    with closing(Peer(ucx)) as rank, closing(Peer(ucx)) as decode:
        regions = [rank.export(held, 0)]
        decode.start("pull_forever", held, [regions[0].SerializeToString()])
        importer = importer_for(held, slots=10)
        assert pulls_right(importer, held, regions)
        decode.signal(signal.SIGKILL)

        assert pulls_right(importer, held, regions)
        assert pulls_right(importer_for(held, slots=10), held, regions)
