import uuid
from contextlib import aclosing

from services.kv_index.events import DEVICE_BIT, Change, Life, blocks
from services.kv_index.index import Index
from services.kv_index.mirror import Mirror
from services.kv_index.store import Store
from shared import farspan_pb2 as pb
from shared.block_hash import BlockHash
from shared.block_journal import BlockJournal


async def test_more_steps_than_may_wait_are_copied_as_a_whole(redis_url: str) -> None:
    """A slow Redis costs a bounded amount of memory, and no block."""
    life = Life(f"w-{uuid.uuid4().hex}", 5)
    journal = BlockJournal(pb.WorkerRef(worker_id=life.worker_id, epoch=life.epoch))
    index = Index()
    async with aclosing(Store(redis_url)) as store:
        mirror = Mirror(index, store, check_interval_s=60)
        for _ in range(1500):
            journal.stored(pb.TIER_HOST, [BlockHash(uuid.uuid4().bytes)])
            batch = journal.commit()
            assert batch is not None
            mirror.append(index.apply(batch))

        await mirror.write()

        (copied,) = [whole for whole in await store.load() if whole.life == life]
        whole = index.whole(life)
        assert whole is not None and copied.sequence == whole.sequence == 1500
        assert blocks(copied.changes) == blocks(whole.changes)


async def test_a_retired_life_leaves_the_copy(redis_url: str) -> None:
    """Also when a step of it was still waiting."""
    life = Life(f"w-{uuid.uuid4().hex}", 5)
    index = Index()
    async with aclosing(Store(redis_url)) as store:
        mirror = Mirror(index, store, check_interval_s=60)
        mirror.append(index.heartbeat(life, 0))
        await mirror.write()
        assert life in [whole.life for whole in await store.load()]

        mirror.append(index.restore(life, 3, [Change(DEVICE_BIT, True, bytes(16))]))
        index.retire(life)
        mirror.retire(life)
        await mirror.write()

        assert life not in [whole.life for whole in await store.load()]
