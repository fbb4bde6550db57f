# SPDX-License-Identifier: Apache-2.0
"""Names, parameters and defaults of the operators of `transformer_engine_torch`."""

import re

TABLE = """
quantize(tensor, quantizer, output=None, noop=None)
dequantize(input, otype)
bgrad_quantize(input, quantizer)
multi_tensor_quantize(tensor_list, quantizer_list)
split_quantize(tensor, split_sections, quantizer_list)
fp8_transpose(input, dtype, *, out)
swap_first_dims(tensor, *, out)
compute_amax(input, amax)
fused_amax_and_scale_update_after_reduction(amax_reduction_buffer, amax_histories, scales,
    amax_compute_algo, fp8_dtype, margin)
fp8_block_scaling_compute_partial_amax(tensor, amax, h, w, start_offset, block_len)
fp8_block_scaling_partial_cast(inp, out, scale, h, w, start_offset, block_len, out_dtype)
generic_gemm(A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in,
    grad, workspace, workspace_size, accumulate, use_split_accumulator, comm_overlap=None,
    comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=None)
te_general_grouped_gemm(A, transa, B, transb, D, D_type, m_splits, bias, bias_type,
    single_output, pre_gelu_out, grad, workspace, workspaceSize, accumulate,
    use_split_accumulator, math_sm_count)
gelu(input, quantizer)
glu(input, quantizer)
geglu(input, quantizer)
qgelu(input, quantizer)
qgeglu(input, quantizer)
relu(input, quantizer)
reglu(input, quantizer)
srelu(input, quantizer)
sreglu(input, quantizer)
silu(input, quantizer)
swiglu(input, quantizer)
clamped_swiglu(input, quantizer, limit=7.0, alpha=1.702)
dgelu(grad, fwd_input, quantizer)
dglu(grad, fwd_input, quantizer)
dgeglu(grad, fwd_input, quantizer)
dqgelu(grad, fwd_input, quantizer)
dqgeglu(grad, fwd_input, quantizer)
drelu(grad, fwd_input, quantizer)
dreglu(grad, fwd_input, quantizer)
dsrelu(grad, fwd_input, quantizer)
dsreglu(grad, fwd_input, quantizer)
dsilu(grad, fwd_input, quantizer)
dswiglu(grad, fwd_input, quantizer)
clamped_dswiglu(grad, fwd_input, quantizer, limit=7.0, alpha=1.702)
dbias_dgelu(grad, fwd_input, quantizer)
dbias_dsilu(grad, fwd_input, quantizer)
dbias_drelu(grad, fwd_input, quantizer)
dbias_dqgelu(grad, fwd_input, quantizer)
dbias_dsrelu(grad, fwd_input, quantizer)
layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin,
    zero_centered_gamma)
layernorm_bwd(dy, x, mu, rsigma, gamma, sm_margin=0, zero_centered_gamma=False)
rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
rmsnorm_bwd(dy, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False, eps=1e-05)
rmsnorm_bwd_add(dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma)
scaled_aligned_causal_masked_softmax_backward(output_grad, softmax_output, scale)
scaled_aligned_causal_masked_softmax_forward(input, scale)
scaled_masked_softmax_backward(output_grad, softmax_output, scale)
scaled_masked_softmax_forward(input, mask, scale)
scaled_softmax_backward(output_grad, softmax_output, scale)
scaled_softmax_forward(input, scale)
scaled_upper_triang_masked_softmax_backward(output_grad, softmax_output, scale)
scaled_upper_triang_masked_softmax_forward(input, scale)
moe_permute_fwd(input, dtype, indices, num_out_tokens, workspace, max_expanded_token_num)
moe_permute_bwd(input, dtype, row_id_map, prob, num_tokens, topK)
moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)
moe_unpermute_bwd(input_bwd, input_fwd, dtype, row_id_map, prob)
fused_topk_with_score_function_fwd(logits, topk, use_pre_softmax, num_groups, group_topk,
    scaling_factor, score_function, expert_bias)
fused_topk_with_score_function_bwd(num_tokens, num_experts, routing_map, intermediate_output,
    grad_probs, topk, use_pre_softmax, scaling_factor, score_function)
fused_score_for_moe_aux_loss_fwd(logits, topk, score_function)
fused_score_for_moe_aux_loss_bwd(num_tokens, num_experts, intermediate_output, grad_scores,
    topk, score_function)
fused_moe_aux_loss_fwd(probs, tokens_per_expert, total_num_tokens, num_experts, num_rows,
    num_cols, topk, coeff)
fused_moe_aux_loss_bwd(Const_buf, tokens_per_expert, num_rows, num_cols, grad_aux_loss)
get_flash_attention_class()
get_fused_attn_backend(is_training, q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type,
    softmax_type, p_dropout, num_attn_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv,
    head_dim_qk, head_dim_v, window_size_left, window_size_right, return_max_logit)
fused_attn_fwd(max_seqlen_q, max_seqlen_kv, is_training, attn_scale, p_dropout, set_zero,
    qkv_layout, bias_type, attn_mask_type, softmax_type, window_size, cu_seqlens_q,
    cu_seqlens_kv, Q, K, V, fake_dtype, cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k,
    page_table_v, s_quantizer, o_quantizer, Bias, SoftmaxOffset, rng_gen, rng_elts_per_thread,
    return_max_logit)
fused_attn_bwd(max_seqlen_q, max_seqlen_kv, attn_scale, p_dropout, set_zero, qkv_layout,
    bias_type, attn_mask_type, softmax_type, window_size, deterministic, cu_seqlens_q,
    cu_seqlens_kv, Q, K, V, O, dO, fake_dtype, dqkv_type, Aux_CTX_Tensors, cu_seqlens_q_padded,
    cu_seqlens_kv_padded, s_quantizer, dp_quantizer, dqkv_quantizer)
fa_prepare_fwd(qkvi)
fa_prepare_bwd(q, k, v)
copy_to_kv_cache(new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens,
    kv_format, b, max_ctx_len, max_seq_len, max_pages_per_seq, is_non_paged)
convert_thd_to_bshd(tensor, cu_seqlens, b, max_seq_len)
convert_bshd_to_thd(tensor, cu_seqlens, t)
thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank)
thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half)
thd_out_correction(out, out_per_step, lse, lse_per_step, cu_seqlens, only_second_half,
    lse_packed)
thd_read_half_tensor(tensor, cu_seqlens, half_idx)
thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen)
thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed)
fused_rope_forward(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size,
    cp_rank)
fused_rope_backward(output_grads, freqs, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
fused_qkv_rope_forward(qkv_input, q_freqs, k_freqs, start_positions, qkv_split_arg_list,
    qkv_format, interleaved, cp_size, cp_rank)
fused_qkv_rope_backward(q_grad_out, k_grad_out, v_grad_out, q_freqs, k_freqs,
    qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank)
dropout_fwd(input, dropout_probability, out=None)
dropout_bwd(grad_output, mask, dropout_probability, grad_input=None)
fused_multi_row_padding(input, output, input_row_list, padded_input_row_list)
fused_multi_row_unpadding(input, output, input_row_list, unpadded_input_row_list)
multi_tensor_adam(chunk_size=None, noop_flag=None, tensor_lists=None, lr=None, beta1=None,
    beta2=None, eps=None, step=None, mode=None, bias_correction=None, weight_decay=None)
multi_tensor_adam_capturable(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon,
    step, mode, bias_correction, weight_decay, inv_scale)
multi_tensor_adam_capturable_master(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2,
    epsilon, step, mode, bias_correction, weight_decay, inv_scale)
multi_tensor_adam_fp8(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step,
    mode, bias_correction, weight_decay, fp8_dtype)
multi_tensor_adam_param_remainder(chunk_size, noop_flag, tensor_lists, lr, beta1, beta2,
    epsilon, step, mode, bias_correction, weight_decay)
multi_tensor_compute_scale_and_scale_inv(chunk_size, noop_flag, tensor_lists, max_fp8,
    force_pow_2_scales, epsilon)
multi_tensor_compute_scale_inv_e8m0(chunk_size, noop_flag, tensor_lists)
multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False)
multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
multi_tensor_scale_tensor(chunk_size, noop_flag, tensor_lists, scale)
multi_tensor_sgd(chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov,
    first_run, wd_after_momentum, scale)
multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, scale, per_tensor=False)
get_cublasLt_version()
get_cudnn_version()
get_num_cublas_streams()
init_nvshmem_backend(process_group)
create_nvshmem_tensor(shape, dtype)
nvshmem_send_on_current_stream(src, dst, peer, signal)
nvshmem_wait_on_current_stream(signal, wait_kind)
nvshmem_finalize()
bulk_overlap_ag_with_external_gemm(allgather_communicator, send_stream, recv_stream)
create_fp8_tensor_meta()
create_comm_overlap_helper(world_group=None, intra_node_group=None)
create_comm_overlap(buffer_shape, buffer_dtype, helper, tp_size, num_splits=3,
    num_max_streams=3, comm_cga_size=2, gemm_priority=0, comm_priority=0, num_comm_sm=16,
    set_sm_margin=True, atomic_gemm=False, rs_overlap_first_gemm=False)
create_comm_overlap_p2p(buffer_shape, buffer_dtype, helper, tp_size, comm_type,
    num_max_streams=3, comm_cga_size=1, gemm_priority=0, comm_priority=0, num_comm_sm=1,
    set_sm_margin=False, atomic_gemm=False, use_ce=True, aggregate=False)
"""

SIGNATURES = {
    name: " ".join(parameters.split())
    for name, parameters in re.findall(r"(\w+)\((.*?)\)", TABLE, re.S)
}
"""Parameters of each operator, as a Python signature has them."""
