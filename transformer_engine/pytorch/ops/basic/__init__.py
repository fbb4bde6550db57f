# SPDX-License-Identifier: Apache-2.0
"""Single operations: names that are not built yet."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals(), ("grouped_linear",))
__all__ = absent.names_of(__name__)
