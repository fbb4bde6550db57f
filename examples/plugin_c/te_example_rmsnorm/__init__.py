# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in C: where the shared object is."""

from pathlib import Path

LIBRARY = Path(__file__).with_name("rmsnorm.so")
