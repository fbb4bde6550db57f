# SPDX-License-Identifier: Apache-2.0
"""``reference.torch``: what operators compute, in plain torch and fp32.

Slow, and short enough to be read: the oracle for whoever writes an implementation. Arguments,
results and errors are those of the module of the same name one level up; results are cast by
quantizers as those are.
"""
