"""What starts the services must set what they read: an unknown setting stops a service."""

import dataclasses
import importlib
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.local.plan import Options, plan
from shared.config import load

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())
SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/config.py"))


def config_of(service: str) -> type[Any]:
    module = importlib.import_module(f"services.{service}.config")
    (found,) = (
        value
        for name, value in vars(module).items()
        if name.endswith("Config") and dataclasses.is_dataclass(value)
    )
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_compose_sets_what_the_service_reads(service: str) -> None:
    """Where no Docker engine runs, this is what keeps compose.yaml from rotting."""
    environ = COMPOSE["services"][service]["environment"]

    load(config_of(service), environ, f"{service.upper()}_")


@pytest.mark.parametrize("service", SERVICES)
def test_the_local_stack_sets_what_the_service_reads(service: str) -> None:
    specs = plan(Options(), Path("/run"), count(20000))
    (environ,) = (spec.environ for spec in specs if f"services.{service}" in spec.command)

    load(config_of(service), environ, f"{service.upper()}_")


def test_only_the_gateway_has_a_host_port() -> None:
    """A fixed host port forbids a second replica."""
    with_ports = [name for name, service in COMPOSE["services"].items() if "ports" in service]

    assert with_ports == ["gateway"]


def test_images_run_the_versions_that_tests_run() -> None:
    """tests/conftest.py uses the same images where a Docker engine answers."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    images = {service["image"] for service in COMPOSE["services"].values() if "image" in service}

    assert images == set(re.findall(r'DockerContainer\("([^"]+)"\)', conftest))


@pytest.mark.parametrize("service", SERVICES)
def test_docker_waits_longer_than_a_service_drains(service: str) -> None:
    """A kill in the middle of a drain would cut streams that were about to end."""
    drain_s = getattr(config_of(service), "drain_s", 0.0)
    grace = COMPOSE["services"][service]["stop_grace_period"]

    assert float(grace.removesuffix("s")) > drain_s
