from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_STARTING: _ClassVar[ServiceState]
    SERVICE_STATE_READY: _ClassVar[ServiceState]
    SERVICE_STATE_DRAINING: _ClassVar[ServiceState]
    SERVICE_STATE_STOPPED: _ClassVar[ServiceState]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_BAD_REQUEST: _ClassVar[FailureKind]
    FAILURE_KIND_TOO_LONG: _ClassVar[FailureKind]
    FAILURE_KIND_OVERLOADED: _ClassVar[FailureKind]
    FAILURE_KIND_WORKER_LOST: _ClassVar[FailureKind]
    FAILURE_KIND_DEADLINE: _ClassVar[FailureKind]
    FAILURE_KIND_CANCELLED: _ClassVar[FailureKind]
    FAILURE_KIND_INTERNAL: _ClassVar[FailureKind]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_STARTING: ServiceState
SERVICE_STATE_READY: ServiceState
SERVICE_STATE_DRAINING: ServiceState
SERVICE_STATE_STOPPED: ServiceState
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_BAD_REQUEST: FailureKind
FAILURE_KIND_TOO_LONG: FailureKind
FAILURE_KIND_OVERLOADED: FailureKind
FAILURE_KIND_WORKER_LOST: FailureKind
FAILURE_KIND_DEADLINE: FailureKind
FAILURE_KIND_CANCELLED: FailureKind
FAILURE_KIND_INTERNAL: FailureKind
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_FAILED: FinishReason

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "retry_after_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    retry_after_ms: int
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "model", "block_hashes", "num_prompt_tokens", "max_new_tokens", "deadline_unix_ms", "excluded", "priority", "known_as", "gateway_id", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KNOWN_AS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    block_hashes: bytes
    num_prompt_tokens: int
    max_new_tokens: int
    deadline_unix_ms: int
    excluded: _containers.RepeatedCompositeFieldContainer[WorkerRef]
    priority: int
    known_as: _containers.RepeatedScalarFieldContainer[str]
    gateway_id: str
    session: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ..., excluded: _Optional[_Iterable[_Union[WorkerRef, _Mapping]]] = ..., priority: _Optional[int] = ..., known_as: _Optional[_Iterable[str]] = ..., gateway_id: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill", "decode", "prefill_hit_tokens", "decode_hit_tokens", "reason")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill: WorkerRef
    decode: WorkerRef
    prefill_hit_tokens: int
    decode_hit_tokens: int
    reason: str
    def __init__(self, prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., prefill_hit_tokens: _Optional[int] = ..., decode_hit_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("placement", "failure")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    failure: Failure
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class PlacementEnded(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GatewayAlive(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class PrefixQuery(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ...) -> None: ...

class PrefixHit(_message.Message):
    __slots__ = ("worker", "tier", "num_blocks", "is_on_the_way")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_ON_THE_WAY_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    tier: Tier
    num_blocks: int
    is_on_the_way: bool
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., num_blocks: _Optional[int] = ..., is_on_the_way: _Optional[bool] = ...) -> None: ...

class PrefixHits(_message.Message):
    __slots__ = ("hits",)
    HITS_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedCompositeFieldContainer[PrefixHit]
    def __init__(self, hits: _Optional[_Iterable[_Union[PrefixHit, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_new_tokens", "min_new_tokens", "stop_token_ids", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_token_ids", "biases", "num_logprobs", "num_prompt_logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    num_logprobs: int
    num_prompt_logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_token_ids: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("num_top", "chosen", "top_token_ids", "top_logprobs")
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_top: int
    chosen: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, num_top: _Optional[int] = ..., chosen: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "begin_unix_us", "end_unix_us", "num_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin_unix_us: int
    end_unix_us: int
    num_tokens: int
    def __init__(self, name: _Optional[str] = ..., begin_unix_us: _Optional[int] = ..., end_unix_us: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "model", "token_ids", "block_hashes", "num_resumed_tokens", "sampling", "prefill", "decode", "gateway_id", "deadline_unix_ms", "hash_root")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    token_ids: bytes
    block_hashes: bytes
    num_resumed_tokens: int
    sampling: SamplingParams
    prefill: WorkerRef
    decode: WorkerRef
    gateway_id: str
    deadline_unix_ms: int
    hash_root: bytes
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., num_resumed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., gateway_id: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., hash_root: _Optional[bytes] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("accepted", "failure")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    failure: Failure
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "kv_format", "block_tokens", "dcp_size", "interleave", "num_mla_layers", "num_index_layers", "row_bytes", "index_page_bytes")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    NUM_MLA_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEX_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    INDEX_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    kv_format: str
    block_tokens: int
    dcp_size: int
    interleave: int
    num_mla_layers: int
    num_index_layers: int
    row_bytes: int
    index_page_bytes: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., kv_format: _Optional[str] = ..., block_tokens: _Optional[int] = ..., dcp_size: _Optional[int] = ..., interleave: _Optional[int] = ..., num_mla_layers: _Optional[int] = ..., num_index_layers: _Optional[int] = ..., row_bytes: _Optional[int] = ..., index_page_bytes: _Optional[int] = ...) -> None: ...

class RankRegions(_message.Message):
    __slots__ = ("agent_name", "agent_metadata", "mla_base", "index_base", "generation_base", "num_blocks", "memory_kind", "device_idx")
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MLA_BASE_FIELD_NUMBER: _ClassVar[int]
    INDEX_BASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDX_FIELD_NUMBER: _ClassVar[int]
    agent_name: str
    agent_metadata: bytes
    mla_base: int
    index_base: int
    generation_base: int
    num_blocks: int
    memory_kind: str
    device_idx: int
    def __init__(self, agent_name: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., mla_base: _Optional[int] = ..., index_base: _Optional[int] = ..., generation_base: _Optional[int] = ..., num_blocks: _Optional[int] = ..., memory_kind: _Optional[str] = ..., device_idx: _Optional[int] = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("block_id", "generation")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    generation: int
    def __init__(self, block_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class HandoffOffer(_message.Message):
    __slots__ = ("request_id", "prefill", "decode", "token_ids", "block_hashes", "num_resumed_tokens", "sampling", "gateway_id", "deadline_unix_ms", "layout", "ranks", "blocks", "lease_ms", "hash_root")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill: WorkerRef
    decode: WorkerRef
    token_ids: bytes
    block_hashes: bytes
    num_resumed_tokens: int
    sampling: SamplingParams
    gateway_id: str
    deadline_unix_ms: int
    layout: KvLayout
    ranks: _containers.RepeatedCompositeFieldContainer[RankRegions]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    lease_ms: int
    hash_root: bytes
    def __init__(self, request_id: _Optional[str] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., num_resumed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., gateway_id: _Optional[str] = ..., deadline_unix_ms: _Optional[int] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankRegions, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ..., lease_ms: _Optional[int] = ..., hash_root: _Optional[bytes] = ...) -> None: ...

class HandoffAccepted(_message.Message):
    __slots__ = ("held_tokens",)
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    def __init__(self, held_tokens: _Optional[int] = ...) -> None: ...

class HandoffReply(_message.Message):
    __slots__ = ("accepted", "failure")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    accepted: HandoffAccepted
    failure: Failure
    def __init__(self, accepted: _Optional[_Union[HandoffAccepted, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("request_id", "prefill", "num_ready_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill: WorkerRef
    num_ready_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., num_ready_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("request_id", "prefill", "first_token_id", "last_hidden", "num_cached_tokens", "first_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill: WorkerRef
    first_token_id: int
    last_hidden: bytes
    num_cached_tokens: int
    first_logprobs: TokenLogprobs
    def __init__(self, request_id: _Optional[str] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., first_token_id: _Optional[int] = ..., last_hidden: _Optional[bytes] = ..., num_cached_tokens: _Optional[int] = ..., first_logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id", "decode")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: WorkerRef
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("decode", "request_ids")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    decode: WorkerRef
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "sender", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sender: WorkerRef
    failure: Failure
    def __init__(self, request_id: _Optional[str] = ..., sender: _Optional[_Union[WorkerRef, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "generated_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("reason", "failure", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    failure: Failure
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "sender", "index", "token_ids", "end", "cached_tokens", "logprobs", "prompt_logprobs", "stages")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sender: WorkerRef
    index: int
    token_ids: bytes
    end: End
    cached_tokens: int
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    def __init__(self, request_id: _Optional[str] = ..., sender: _Optional[_Union[WorkerRef, _Mapping]] = ..., index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., end: _Optional[_Union[End, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Tokens]
    def __init__(self, messages: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ...) -> None: ...

class TokensReply(_message.Message):
    __slots__ = ("next_index",)
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    next_index: int
    def __init__(self, next_index: _Optional[int] = ...) -> None: ...

class ResendTokens(_message.Message):
    __slots__ = ("request_id", "from_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_index: int
    def __init__(self, request_id: _Optional[str] = ..., from_index: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sequence_tokens", "max_concurrent", "max_whole_pages", "leased_device_pages")
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_FIELD_NUMBER: _ClassVar[int]
    MAX_WHOLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    max_sequence_tokens: int
    max_concurrent: int
    max_whole_pages: int
    leased_device_pages: int
    def __init__(self, max_sequence_tokens: _Optional[int] = ..., max_concurrent: _Optional[int] = ..., max_whole_pages: _Optional[int] = ..., leased_device_pages: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "waiting_tokens", "free_blocks", "total_blocks", "free_device_pages", "total_device_pages", "free_index_pages", "total_index_pages", "tokens_per_s", "hot_hits", "hot_misses", "host_read_bytes", "kv_bytes_moved", "eviction_age_s", "empty_blocks", "step_s", "measured_age_s")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_INDEX_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_INDEX_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HOT_HITS_FIELD_NUMBER: _ClassVar[int]
    HOT_MISSES_FIELD_NUMBER: _ClassVar[int]
    HOST_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    EVICTION_AGE_S_FIELD_NUMBER: _ClassVar[int]
    EMPTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    free_device_pages: int
    total_device_pages: int
    free_index_pages: int
    total_index_pages: int
    tokens_per_s: float
    hot_hits: int
    hot_misses: int
    host_read_bytes: int
    kv_bytes_moved: int
    eviction_age_s: float
    empty_blocks: int
    step_s: float
    measured_age_s: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_device_pages: _Optional[int] = ..., total_device_pages: _Optional[int] = ..., free_index_pages: _Optional[int] = ..., total_index_pages: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., hot_hits: _Optional[int] = ..., hot_misses: _Optional[int] = ..., host_read_bytes: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., eviction_age_s: _Optional[float] = ..., empty_blocks: _Optional[int] = ..., step_s: _Optional[float] = ..., measured_age_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("worker", "role", "state", "model", "layout", "limits", "load", "event_sequence", "block_digest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    role: Role
    state: ServiceState
    model: str
    layout: KvLayout
    limits: Limits
    load: Load
    event_sequence: int
    block_digest: bytes
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[ServiceState, str]] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., event_sequence: _Optional[int] = ..., block_digest: _Optional[bytes] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("tier", "block_hashes", "num_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    block_hashes: bytes
    num_tokens: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., block_hashes: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("tier", "block_hashes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    block_hashes: bytes
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class BlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: BlocksCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[BlocksCleared, _Mapping]] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("worker", "sequence", "events")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("worker", "from_sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    from_sequence: int
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., from_sequence: _Optional[int] = ...) -> None: ...

class BlockSnapshot(_message.Message):
    __slots__ = ("sequence", "device_block_hashes", "host_block_hashes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    device_block_hashes: bytes
    host_block_hashes: bytes
    def __init__(self, sequence: _Optional[int] = ..., device_block_hashes: _Optional[bytes] = ..., host_block_hashes: _Optional[bytes] = ...) -> None: ...

class ReplayReply(_message.Message):
    __slots__ = ("batches", "snapshot")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[BlockEvents]
    snapshot: BlockSnapshot
    def __init__(self, batches: _Optional[_Iterable[_Union[BlockEvents, _Mapping]]] = ..., snapshot: _Optional[_Union[BlockSnapshot, _Mapping]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("prefill", "decode", "prefill_tokens", "prefill_s", "decode_pages", "device_pages", "lifetime_ms", "gateway_id")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    prefill: WorkerRef
    decode: WorkerRef
    prefill_tokens: int
    prefill_s: float
    decode_pages: int
    device_pages: int
    lifetime_ms: int
    gateway_id: str
    def __init__(self, prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., prefill_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., decode_pages: _Optional[int] = ..., device_pages: _Optional[int] = ..., lifetime_ms: _Optional[int] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class Promised(_message.Message):
    __slots__ = ("prefill_tokens", "num_new", "num_requests", "num_pages", "num_device_pages")
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens: int
    num_new: int
    num_requests: int
    num_pages: int
    num_device_pages: int
    def __init__(self, prefill_tokens: _Optional[int] = ..., num_new: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_device_pages: _Optional[int] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("heartbeat", "promised")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    promised: Promised
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., promised: _Optional[_Union[Promised, _Mapping]] = ...) -> None: ...

class DecisionInputs(_message.Message):
    __slots__ = ("request", "prefix_digest", "workers", "hits", "rates", "lifetime_s")
    class RatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    request: PlaceRequest
    prefix_digest: bytes
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    hits: _containers.RepeatedCompositeFieldContainer[PrefixHit]
    rates: _containers.ScalarMap[str, float]
    lifetime_s: float
    def __init__(self, request: _Optional[_Union[PlaceRequest, _Mapping]] = ..., prefix_digest: _Optional[bytes] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., hits: _Optional[_Iterable[_Union[PrefixHit, _Mapping]]] = ..., rates: _Optional[_Mapping[str, float]] = ..., lifetime_s: _Optional[float] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("worker", "role", "left_out", "must_wait", "cost_s", "hit_tokens", "figures")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MUST_WAIT_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    role: Role
    left_out: str
    must_wait: bool
    cost_s: float
    hit_tokens: int
    figures: str
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., left_out: _Optional[str] = ..., must_wait: _Optional[bool] = ..., cost_s: _Optional[float] = ..., hit_tokens: _Optional[int] = ..., figures: _Optional[str] = ...) -> None: ...

class DecisionOutcome(_message.Message):
    __slots__ = ("placement", "failure", "reservation", "scores")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    failure: Failure
    reservation: Reservation
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("router_id", "decided_unix_ms", "inputs", "outcome", "withdrawn")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    DECIDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    decided_unix_ms: int
    inputs: DecisionInputs
    outcome: DecisionOutcome
    withdrawn: str
    def __init__(self, router_id: _Optional[str] = ..., decided_unix_ms: _Optional[int] = ..., inputs: _Optional[_Union[DecisionInputs, _Mapping]] = ..., outcome: _Optional[_Union[DecisionOutcome, _Mapping]] = ..., withdrawn: _Optional[str] = ...) -> None: ...

class DecisionQuery(_message.Message):
    __slots__ = ("id", "reply_to")
    ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    id: str
    reply_to: str
    def __init__(self, id: _Optional[str] = ..., reply_to: _Optional[str] = ...) -> None: ...

class DecisionReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DecisionRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[DecisionRecord, _Mapping]]] = ...) -> None: ...
