"""What several of the router's tests are given."""

import pytest

from tests.services.router.fleets import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
