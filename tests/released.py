"""The released model's dimensions, for tests of what its bytes look like."""

from shared.engine.model.config import AttentionConfig

ATTENTION = AttentionConfig(
    num_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    nope_dim=192,
    rope_dim=64,
    value_dim=256,
    index_heads=32,
    index_dim=128,
    index_topk=2048,
)
