# SPDX-License-Identifier: Apache-2.0
"""Debug features of nvdlfw_inspect for PyTorch, which are not built yet."""
