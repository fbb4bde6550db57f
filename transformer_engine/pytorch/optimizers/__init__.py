# SPDX-License-Identifier: Apache-2.0
"""Operations on lists of tensors, and optimizers."""

from transformer_engine.common import absent

_NAMES_OF = {
    "fused_adam": "FusedAdam",
    "fused_sgd": "FusedSGD",
    "multi_tensor_apply": "MultiTensorApply multi_tensor_applier multi_tensor_l2norm "
    "multi_tensor_scale multi_tensor_scale_tensor multi_tensor_unscale_l2norm",
    "multi_tensor_step": "multi_tensor_adam multi_tensor_adam_capturable "
    "multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_adam_param_remainder "
    "multi_tensor_compute_scale_and_scale_inv multi_tensor_sgd",
}
_LAZY = {name: f"{__name__}.{of}" for of, names in _NAMES_OF.items() for name in names.split()}
__getattr__, __dir__ = absent.attach(globals(), _NAMES_OF, _LAZY)
