# SPDX-License-Identifier: Apache-2.0
"""``reference.torch``: what operators compute, in plain torch.

Slow, and short enough to be read: the definition for whoever writes an implementation, with which
`plugin.check` compares. Arguments, results and errors are those of the module of the same name one
level up; results are cast by quantizers as those are. Sums are fp32; of float64 arguments all is
float64, results too: so `plugin.check` asks.
"""
