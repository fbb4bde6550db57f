# SPDX-License-Identifier: Apache-2.0
"""JAX as the tests of its front end want it: it leaves the memory of a GPU to others, too."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
