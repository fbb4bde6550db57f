# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for `make sanitize`: refuse to run against any but the sanitized extension.

What C code reads and writes goes by a dtype, a layout and a shape, hardly ever by more at a time:
of each test those cases run that together have all values of any three parameters (with `--nightly`
all cases). `make test` runs them all, and looks for writes around the results by itself.
"""

import pytest

import transformer_engine._core as core


def pytest_configure():
    """Stop before the first test where the extension is another one."""
    if "sanitize" not in core.__file__:
        raise RuntimeError(f"expected the sanitized extension, not {core.__file__}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out cases whose values others have, three by three."""
    if config.getoption("nightly"):
        return
    from thinning import keep_triples  # of tests/, which is to be found by now

    kept = set(keep_triples(items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
