"""Workers for the router's tests: heartbeats of a small, healthy fleet, to be varied."""

from collections.abc import Sequence

from services.router.view import Promised, Worker
from shared import farspan_pb2 as pb
from shared.block_hash import BLOCK_TOKENS, HASH_BYTES


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


MODEL = "demo"
LAYOUT = pb.KvLayout(
    model_fingerprint="f",
    kv_format="fp8_ds_mla",
    block_tokens=64,
    dcp_size=1,
    interleave=1,
    num_mla_layers=79,
    num_index_layers=22,
    row_bytes=656,
    index_page_bytes=8448,
)


def load(**values: float) -> pb.Load:
    whole = pb.Load(
        free_blocks=20_000,
        total_blocks=20_000,
        free_device_pages=1000,
        total_device_pages=1000,
        free_index_pages=20_000,
        total_index_pages=20_000,
        tokens_per_s=10_000.0,
    )
    for name, value in values.items():
        setattr(whole, name, value)
    return whole


def heartbeat(
    worker_id: str,
    role: pb.Role,
    *,
    epoch: int = 1,
    state: pb.ServiceState = pb.SERVICE_STATE_READY,
    model: str = MODEL,
    layout: pb.KvLayout = LAYOUT,
    limits: pb.Limits | None = None,
    load: pb.Load | None = None,
) -> pb.Heartbeat:
    return pb.Heartbeat(
        worker=pb.WorkerRef(worker_id=worker_id, epoch=epoch),
        role=role,
        state=state,
        model=model,
        layout=layout,
        limits=limits or pb.Limits(max_sequence_tokens=1_048_576, max_concurrent=32),
        load=load if load is not None else _IDLE,
    )


_IDLE = load()


def prefill(worker_id: str, promised: Promised | None = None, **values: object) -> Worker:
    beat = heartbeat(worker_id, pb.ROLE_PREFILL, **values)  # type: ignore[arg-type]
    return Worker(beat, promised or Promised())


def decode(worker_id: str, promised: Promised | None = None, **values: object) -> Worker:
    beat = heartbeat(worker_id, pb.ROLE_DECODE, **values)  # type: ignore[arg-type]
    return Worker(beat, promised or Promised())


def request(
    num_prompt_tokens: int = 1000,
    max_new_tokens: int = 100,
    *,
    request_id: str = "r",
    hashes: bytes | None = None,
    excluded: list[pb.WorkerRef] | None = None,
    deadline_unix_ms: int = 0,
    priority: int = 0,
    known_as: Sequence[str] = (),
) -> pb.PlaceRequest:
    num_blocks = num_prompt_tokens // BLOCK_TOKENS
    return pb.PlaceRequest(
        request_id=request_id,
        model=MODEL,
        block_hashes=chain(num_blocks) if hashes is None else hashes,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        deadline_unix_ms=deadline_unix_ms,
        excluded=excluded or [],
        priority=priority,
        known_as=known_as,
    )


def chain(num_blocks: int, first: int = 0) -> bytes:
    return b"".join(i.to_bytes(HASH_BYTES, "big") for i in range(first, first + num_blocks))
