# SPDX-License-Identifier: Apache-2.0
"""State of torch, asked in one place: modes, devices, kinds of tensors, graph breaks."""
