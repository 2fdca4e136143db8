"""The released configuration, and everything that must be refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.engine.model.config import load_config, parse_config
from shared.errors import ConfigError
from tests import demo

NUM_LAYERS = 78
OWNERS = (0, 1, *range(2, NUM_LAYERS, 4))


def glm(**changes: Any) -> dict[str, Any]:
    """GLM-5.3's config.json as far as it says anything about the architecture."""
    return {
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "head_dim": 192,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "indexer_types": ["full" if i in OWNERS else "shared" for i in range(NUM_LAYERS)],
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
        "max_position_embeddings": 1_048_576,
        "intermediate_size": 12288,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
        "vocab_size": 154880,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": [154820, 154827, 154829],
        **changes,
    }


def without(*fields: str) -> dict[str, Any]:
    return {name: value for name, value in glm().items() if name not in fields}


def test_the_released_model_has_21_indexers_and_the_mtp_layers() -> None:
    """{0, 1, 2, 6, ..., 74}, and layer 78; the others reuse what the last owner chose."""
    config = parse_config(glm())

    assert config.index_layers == (0, 1, 2, *range(6, 75, 4), 78)
    assert len(config.index_layers) == 21 + 1
    assert config.num_kv_layers == 79
    assert config.index_groups[:3] == ((0,), (1,), (2, 3, 4, 5))
    assert config.index_groups[-2:] == ((74, 75, 76, 77), (78,))
    assert sum(config.is_moe) == 75 + 1 and config.is_moe[78]


def test_head_dim_is_not_believed() -> None:
    """Released files carry a meaningless one, and other libraries write a third."""
    config = parse_config(glm(head_dim=64))

    assert config == parse_config(glm())
    assert config.attention.latent_dim == 576
    assert config.attention.scale == 1 / 16


@pytest.mark.parametrize("fields", [("indexer_types",), ("index_topk_freq",)])
def test_either_way_of_naming_the_owners_is_enough(fields: tuple[str, ...]) -> None:
    """Peers read different fields; a file may have only one."""
    config = parse_config(without("index_topk_pattern", *fields))

    assert config.owns_indexer == parse_config(glm()).owns_indexer


def test_without_any_field_every_layer_owns_an_indexer() -> None:
    """GLM-5 and 5.1 say nothing about sharing."""
    fields = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")

    assert all(parse_config(without(*fields)).owns_indexer)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": ["full"] * NUM_LAYERS},
        {"index_topk_freq": 2},
        {"index_skip_topk_offset": 2},
        {"index_topk_pattern": "F" * NUM_LAYERS},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_contradictory_owners_are_refused(changes: dict[str, Any]) -> None:
    """Servers would disagree on which layers choose: results differ silently."""
    with pytest.raises(ConfigError, match=r"indexer_types.*name different layers"):
        parse_config(glm(**changes))


def test_the_first_layer_must_choose() -> None:
    """There is nothing it could reuse."""
    changed = without("index_topk_freq", "index_skip_topk_offset")
    changed["indexer_types"] = ["shared"] * NUM_LAYERS

    with pytest.raises(ConfigError, match="layer 0 must own an indexer"):
        parse_config(changed)


def test_every_layer_must_be_named() -> None:
    """A list of another length belongs to another model."""
    changed = without("index_topk_freq", "index_skip_topk_offset")
    changed["indexer_types"] = ["full"] * (NUM_LAYERS - 1)

    with pytest.raises(ConfigError, match="every layer must be named"):
        parse_config(changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "glm5_next"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 8),
        ("topk_group", 4),
        ("norm_topk_prob", False),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 0),
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "yarn"}),
        ("mlp_layer_types", ["sparse"] * NUM_LAYERS),
        ("moe_layer_freq", 2),
        ("qk_head_dim", 192),
        ("index_head_dim", 32),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: Any) -> None:
    """Ignoring such a field would compute something else, fluently."""
    wanted = "rope_type" if field == "rope_parameters" else field
    with pytest.raises(ConfigError, match=wanted):
        parse_config(glm(**{field: value}))


def written(directory: Path, content: str) -> Path:
    (directory / "config.json").write_text(content)
    return directory


def test_a_missing_field_is_named_with_its_file(tmp_path: Path) -> None:
    """The operator learns which file to look at."""
    with pytest.raises(ConfigError, match=r"config\.json has no field 'kv_lora_rank'"):
        load_config(written(tmp_path, json.dumps(without("kv_lora_rank"))))


def test_a_refused_field_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: hidden_act='relu'"):
        load_config(written(tmp_path, json.dumps(glm(hidden_act="relu"))))


@pytest.mark.parametrize("content", ["", "{", "[1, 2", "\x00"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    """A download that broke off."""
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_config(written(tmp_path, content))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "many"),
        ("num_hidden_layers", 0),
        ("index_topk", True),
        ("index_topk_freq", 0),
        ("rms_norm_eps", None),
        ("rope_parameters", 1),
        ("rope_theta", {}),
    ],
)
def test_a_field_with_a_senseless_value_is_refused_by_name(
    tmp_path: Path, field: str, value: Any
) -> None:
    """As an operator's mistake, not as a crash."""
    changes = (
        {"rope_parameters": {"rope_theta": value}} if field == "rope_theta" else {field: value}
    )
    with pytest.raises(ConfigError, match=rf"config\.json: {field}"):
        load_config(written(tmp_path, json.dumps(glm(**changes))))


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not hold a JSON object"):
        load_config(written(tmp_path, "[]"))


def test_one_stop_token_may_stand_alone() -> None:
    """Some files write a number instead of a list."""
    assert parse_config(glm(eos_token_id=7)).stop_token_ids == (7,)


def test_the_bundled_checkpoint_is_one_of_this_family() -> None:
    """Owners {0, 1, 2} and the MTP layer's."""
    assert load_config(demo.CHECKPOINT).index_layers == (0, 1, 2, 6)
