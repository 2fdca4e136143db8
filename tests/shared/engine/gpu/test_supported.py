"""A model that the kernels cannot compute is refused at the start."""

from dataclasses import replace

import pytest

from shared.engine.gpu.supported import require_supported
from shared.engine.model.config import load_config
from shared.errors import ConfigError
from tests import demo

ATTENTION = load_config(demo.CHECKPOINT).attention


def test_the_bundled_model_is_supported() -> None:
    require_supported("fp8_ds_mla", ATTENTION)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 12),
        ("kv_lora_rank", 256),
        ("rope_dim", 32),
        ("index_dim", 64),
        ("index_heads", 8),
        ("index_topk", 4096),
    ],
)
def test_what_no_kernel_computes_is_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*{value}|{field} is at most.*{value}"):
        require_supported("fp8_ds_mla", replace(ATTENTION, **{field: value}))


def test_only_the_kernels_format_is_supported() -> None:
    with pytest.raises(ConfigError, match="fp8_ds_mla, not fp32"):
        require_supported("fp32", ATTENTION)
