"""Shared by the planner's tests."""

import pytest


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Traces of this module's tests go to a folder of their own, so that an old one is never taken for a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
