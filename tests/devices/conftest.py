"""A pretend accelerator, and toy bases on it."""

import copy
from dataclasses import replace
from functools import cache

import pytest

from tests.devices.pretend import Accelerator


@pytest.fixture
def accelerator():
    with Accelerator() as accelerator:
        yield accelerator


@pytest.fixture(scope="session")
def make_pretend_base(make_base):
    """Build the toy base of `make_base` on the accelerator, whose fixture a test has to request too."""

    @cache
    def make(*arguments, **options):
        base = make_base(*arguments, **options)
        return replace(base, model=copy.deepcopy(base.model).to(Accelerator.device))

    return make
