"""What the kernels can do, told before a worker starts: they would refuse it in its first step."""

from shared.engine.model.config import AttentionConfig
from shared.errors import ConfigError

_DIMENSIONS = {"kv_lora_rank": (512,), "rope_dim": (64,), "index_dim": (128,)}
_COUNTS = {"num_heads": (8, 16, 32, 64), "index_heads": (16, 32)}
_MAX_TOPK = 2048


def require_supported(kv_format: str, attention: AttentionConfig) -> None:
    """ConfigError for a KV format, or a model, that the kernels do not read."""
    if kv_format != "fp8_ds_mla":
        raise ConfigError(f"on a GPU the KV format is fp8_ds_mla, not {kv_format}")
    for name, known in (_DIMENSIONS | _COUNTS).items():
        value = getattr(attention, name)
        if value not in known:
            raise ConfigError(f"on a GPU {name} is one of {known}, not {value}")
    if attention.index_topk > _MAX_TOPK:
        raise ConfigError(f"on a GPU index_topk is at most {_MAX_TOPK}: {attention.index_topk}")
