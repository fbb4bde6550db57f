# SPDX-License-Identifier: Apache-2.0
"""What torch is doing, asked in one place: modes, devices, kinds of tensors, graph breaks."""
