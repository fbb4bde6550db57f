# SPDX-License-Identifier: Apache-2.0
"""Debug features of nvdlfw_inspect, which are not built yet."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = absent.names_of(__name__)
