# SPDX-License-Identifier: Apache-2.0
"""Debug features of nvdlfw_inspect for PyTorch, which are not built yet."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals(), ("debug_state",))
__all__ = absent.names_of(__name__)
