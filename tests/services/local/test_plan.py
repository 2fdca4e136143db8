from itertools import count
from pathlib import Path

import pytest

from services.local.plan import Options, Spec, environment, plan

FOLDER = Path("/run/farspan")


def planned(options: Options) -> dict[str, Spec]:
    return {spec.name: spec for spec in plan(options, FOLDER, count(20000))}


def test_servers_come_before_the_services_that_need_them() -> None:
    names = list(planned(Options()))

    assert names == ["nats", "redis", "kv_index", "router", "prefill-0", "decode-0", "gateway"]


def test_every_process_has_a_port_of_its_own() -> None:
    specs = planned(Options(decode_workers=3, prefill_workers=2)).values()

    assert len({spec.port for spec in specs}) == len(specs) == 10


def test_options_become_settings() -> None:
    """The names are the contract with the services' config modules."""
    options = Options(
        port=9000,
        checkpoint=Path("/models/glm"),
        prefill_ranks=4,
        interleave=1,
        kv_format="fp32",
        decode_workers=2,
    )

    specs = planned(options)

    assert specs["gateway"].environ["GATEWAY_PORT"] == "9000"
    assert specs["gateway"].environ["GATEWAY_MODEL"] == "glm"
    assert specs["prefill-0"].environ.items() >= {
        ("PREFILL_RANKS", "4"),
        ("PREFILL_INTERLEAVE", "1"),
        ("PREFILL_KV_FORMAT", "fp32"),
        ("PREFILL_CHECKPOINT", "/models/glm"),
    }
    assert specs["decode-1"].environ["DECODE_WORKER_ID"] == "decode-1"
    assert specs["decode-1"].environ["DECODE_KV_FORMAT"] == "fp32"


def test_each_rank_and_worker_gets_a_gpu_of_its_own() -> None:
    """But for prefill and decode, which may share one."""
    options = Options(
        prefill_workers=2,
        prefill_ranks=2,
        prefill_device="cuda:0",
        decode_workers=2,
        decode_device="cuda:3",
    )

    specs = planned(options)

    assert specs["prefill-0"].environ["PREFILL_DEVICE"] == "cuda:0"
    assert specs["prefill-1"].environ["PREFILL_DEVICE"] == "cuda:2"
    assert specs["decode-0"].environ["DECODE_DEVICE"] == "cuda:3"
    assert specs["decode-1"].environ["DECODE_DEVICE"] == "cuda:4"
    assert planned(Options(decode_workers=2))["decode-1"].environ["DECODE_DEVICE"] == "cpu"


def test_services_meet_at_the_same_addresses() -> None:
    specs = planned(Options())

    nats_url = f"nats://127.0.0.1:{specs['nats'].port}"
    assert specs["router"].environ["ROUTER_NATS_URL"] == nats_url
    assert specs["decode-0"].environ["DECODE_NATS_URL"] == nats_url
    assert specs["kv_index"].environ["KV_INDEX_REDIS_URL"].endswith(f":{specs['redis'].port}/0")
    assert specs["kv_index"].environ["KV_INDEX_REDIS_REQUIRED"] == "false", "it is started again"
    assert specs["router"].environ["ROUTER_REDIS_URL"].endswith(f":{specs['redis'].port}/0")
    address = specs["kv_index"].environ["KV_INDEX_GRPC_ADDRESS"]
    assert specs["router"].environ["ROUTER_KV_INDEX_ADDRESS"] == address


def test_the_caller_may_overrule_network_defaults_but_not_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX's device is the user's choice; a stray ROUTER_NATS_URL would split the stack."""
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    monkeypatch.setenv("ROUTER_NATS_URL", "nats://elsewhere")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    environ = environment(planned(Options())["router"])

    assert environ["UCX_NET_DEVICES"] == "eth0"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ["ROUTER_NATS_URL"].startswith("nats://127.0.0.1:")


def test_more_settings_reach_every_process() -> None:
    """Tests size pools this way."""
    specs = planned(Options(settings={"DECODE_HOT_ROWS": "512"}))

    assert specs["decode-0"].environ["DECODE_HOT_ROWS"] == "512"
