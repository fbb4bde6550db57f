# SPDX-License-Identifier: Apache-2.0
"""Debug features of nvdlfw_inspect, which are not built yet."""
