"""The parameters and defaults of liger_kernel's names, by the module of this package that defines them.

A class has a row for its constructor and one for `forward`. To TorchScript, parameters without annotation are tensors.
"""

CROSS_ENTROPY = (
    "ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False"
)
METRICS = "return_token_accuracy=False, return_predicted_tokens=False"
LINEAR_CROSS_ENTROPY = f"ce_weight=None, {CROSS_ENTROPY}, accum_dtype=None, use_token_scaling=False, {METRICS}"
SCALED_CROSS_ENTROPY_TP = (
    "weight, target, tp_group, temperature=1.0, ignore_index=-100, tiles_per_reduce=1, return_entropy=False"
)
KL_DIV = "y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10"
JSD = "target, shift_labels=None, beta=0.5, ignore_index=-100"
LINEAR_KL_DIV = "reduction='batchmean', ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None"
STUDENT_AND_TEACHER = "student_input, student_weight, teacher_input, teacher_weight"
LINEAR_JSD = "jsd_beta=0.5, ignore_index=-100, temperature=1.0"
LINEAR_JSD_CALL = f"{STUDENT_AND_TEACHER}, shift_labels=None, {LINEAR_JSD}"
NORM = "offset=0.0, casting_mode='llama'"
MULTIPLIERS = "gate_multiplier=1.0, down_multiplier=1.0"
ROPE = "q, k, cos, sin, position_ids=None, unsqueeze_dim=1"
MROPE = "q, k, cos, sin, mrope_section, unsqueeze_dim=1"
CENTERED = "eps=1e-6, offset=1.0, casting_mode='gemma', init_fn='zeros'"
SCALED = "eps=1e-6, offset=0.0, casting_mode='gemma', init_fn='ones', in_place=False, with_scale=True"

CONVOLUTION = "stride=1, padding=0, dilation=1, groups=1"
NEIGHBOURS = "kernel_size=7, dilation=1, scale=None"
SINKHORN = "tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult"
MHC = "phi, b, alpha_pre, alpha_post, alpha_res"
MHC_OPTIONS = "allow_fp32=False, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0"

PAIRS = "_input, weight, target, bias=None"
REFERENCE = "ref_input=None, ref_weight=None, ref_bias=None"
CHUNKS = "average_log_prob=False, chunk_size=1"
SMOOTHED = "ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0"
DISTILLATION = (
    "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
    "chunk_size=1024, return_soft_hard_loss=False"
)
SAMPLES = "attention_mask, advantages, bias=None, ref_per_token_logps=None, old_per_token_logps=None"
SAPO = "sapo_temperature_pos=1.0, sapo_temperature_neg=1.05"
VESPO = "vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0"
POLICY = "loss_type='dapo', max_completion_length=None, importance_sampling_level='token'"

OPS = {
    "LigerRMSNormFunction": f"X, W, eps, {NORM}, in_place=True, row_mode=None",
    "LigerFusedAddRMSNormFunction": f"X, R, W, eps, {NORM}, in_place=False",
    "LigerLayerNormFunction": "X, W, B, eps",
    "LigerSiLUMulFunction": f"a, b, {MULTIPLIERS}",
    "LigerFusedGateUpSiLUMulFunction": "y, in_place=False",
    "LigerReLUSquaredFunction": "X",
    "LigerGELUMulFunction": "a, b",
    "LigerMLPFunction": f"input, gate_weight, up_weight, down_weight, {MULTIPLIERS}",
    "LigerFusedMoEFunction": "x, gate_up_proj, down_proj, top_k_index, top_k_weights",
    "LigerTiledMLPFunction": "fn, mlp_module, x, shards, compute_params=None",
    "LigerEmbeddingFunction": "embeddings, indices",
    "LigerRopeFunction": f"{ROPE}, rotary_dim=None",
    "LigerQwen2VLMRopeFunction": MROPE,
    "LigerLlama4RopeFunction": "q, k, freqs_cis, BLOCK_SIZE=None",
    "LigerCrossEntropyFunction": f"_input, target, weight, {CROSS_ENTROPY}, {METRICS}",
    "LigerFusedLinearCrossEntropyFunction": (
        f"{PAIRS}, {LINEAR_CROSS_ENTROPY}, ce_impl=None, ce_mode=None, chunk_mem_const=1"
    ),
    "LigerKLDivLossFunction": KL_DIV,
    "LigerJSDFunction": f"_input, {JSD}, jsd_impl=None, jsd_mode=None",
    "LigerTVDLossFunction": "p, q, shift_labels=None, reduction='batchmean', ignore_index=-100",
    "LigerFusedCETVDFunction": "student_logits, teacher_logits, target, ignore_index=-100",
    "LigerFusedLinearJSDFunction": f"{LINEAR_JSD_CALL}, accum_dtype=None, jsd_impl=None, jsd_mode=None",
    "LigerFusedLinearKLDivFunction": f"student_input, student_weight, target, shift_labels=None, {LINEAR_KL_DIV}",
    "LigerFusedLinearScaledCrossEntropyFunction": (
        "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False, "
        "selected_token_ids=None"
    ),
    "LigerFusedLinearScaledCrossEntropyTPFunction": f"_input, {SCALED_CROSS_ENTROPY_TP}",
    "LigerVocabParallelCEFunction": (
        "vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula, "
        "label_smoothing_mode"
    ),
}
FUNCTIONS = {
    "liger_rotary_pos_emb": f"{ROPE}, rotary_dim=None",
    "liger_multimodal_rotary_pos_emb": MROPE,
    "liger_llama4_text_rotary_pos_emb": "xq, xk, freqs_cis",
    "liger_cross_entropy": (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        f"label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, {METRICS}"
    ),
    "liger_fused_linear_cross_entropy": f"input, weight, target, bias=None, {LINEAR_CROSS_ENTROPY}, chunk_mem_const=1",
    "liger_kl_div": "input, target, size_average=True, reduce=True, reduction='mean', log_target=False, eps=1e-10",
    "liger_jsd": f"input, {JSD}",
    "liger_tvd": "input, target, shift_labels=None, reduction='mean', ignore_index=-100",
    "liger_fused_linear_jsd": f"{LINEAR_JSD_CALL}, accum_dtype=None",
    "liger_fused_linear_kl_div": OPS["LigerFusedLinearKLDivFunction"],
    "liger_fused_linear_scaled_cross_entropy_tp": f"input, {SCALED_CROSS_ENTROPY_TP}",
    "liger_fused_add_rms_norm": f"X, R, W, eps, {NORM}, in_place=True",
    "liger_rms_norm": f"X, W, eps, {NORM}, in_place=True",
    "liger_layer_norm": "X, W, B, eps",
    "liger_relu_squared": "x",
    "liger_swiglu": "a, b",
    "liger_geglu": "a, b",
}
# All of them also take impl, mode and backend.
FUNCTIONAL = {
    "rms_norm": f"x, weight, eps=1e-6, *, {NORM}, in_place=False, row_mode=None",
    "fused_add_rms_norm": f"X, R, W, eps=1e-6, {NORM}, in_place=False, *",
    "layer_norm": "x, weight, bias=None, eps=1e-6, *",
    "swiglu": f"a, b, {MULTIPLIERS}, *",
    "geglu": "a, b, *",
    "rope": f"{ROPE}, *",
    "softmax": "x, *",
    "cross_entropy": f"input, target, weight=None, {CROSS_ENTROPY}, {METRICS}, *",
    "fused_linear_cross_entropy": f"{PAIRS}, {LINEAR_CROSS_ENTROPY}, *",
    "kl_div": f"{KL_DIV}, *",
    "jsd": f"_input, {JSD}, *",
    "fused_linear_jsd": f"{LINEAR_JSD_CALL}, *",
}
LAYERS = {
    "LigerRMSNormForGemma": f"hidden_size, {CENTERED}, in_place=True, row_mode=None",
    "LigerRMSNormForGemma2": f"hidden_size, {CENTERED}, in_place=False, row_mode=None",
    "LigerRMSNormForGemma3": f"dim, {CENTERED}, in_place=False",
    "LigerRMSNormForOlmo2": f"hidden_size, eps=1e-6, {NORM}, init_fn='ones', in_place=False, row_mode=None",
    "LigerRMSNormForGemma4": f"dim, {SCALED}",
    "LigerRMSNormForMuseGlimmer": f"dim=None, {SCALED}",
    "LigerReLUSquared": "",
    "LigerReLUSquared.forward": "x",
    "LigerCrossEntropyLoss": f"weight=None, {CROSS_ENTROPY}, {METRICS}",
    "LigerCrossEntropyLoss.forward": "_input, target",
    "LigerFusedLinearCrossEntropyLoss": LINEAR_CROSS_ENTROPY,
    "LigerFusedLinearCrossEntropyLoss.forward": "lin_weight, _input, target, bias=None",
    "LigerJSD": "beta=0.5, ignore_index=-100",
    "LigerJSD.forward": "log_q, log_p, shift_labels: Tensor | None = None",
    "LigerTVDLoss": "reduction='batchmean', ignore_index=-100",
    "LigerTVDLoss.forward": "p, q, shift_labels: Tensor | None = None",
    "LigerFusedCETVDLoss": "ignore_index=-100",
    "LigerFusedCETVDLoss.forward": "student_logits, teacher_logits, target",
    "LigerFusedLinearJSD": f"{LINEAR_JSD}, accum_dtype=None",
    "LigerFusedLinearJSD.forward": f"{STUDENT_AND_TEACHER}, shift_labels",
    "LigerFusedLinearKLDivLoss": LINEAR_KL_DIV,
    "LigerFusedLinearKLDivLoss.forward": "student_input, student_weight, target, shift_labels=None",
    "LigerVocabParallelCrossEntropy": (
        "ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='pytorch', "
        "label_smoothing_mode='global'"
    ),
    "LigerVocabParallelCrossEntropy.forward": "vocab_parallel_logits, target, tp_group=None",
}
CHUNKED_LOSS = {
    "LigerFusedLinearDPOFunction": (
        f"{PAIRS}, {REFERENCE}, ignore_index=-100, beta=0.1, compute_nll_loss=False, compiled=True, "
        f"use_ref_model=True, {CHUNKS}, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05, alpha=1.0"
    ),
    "LigerFusedLinearDPOLoss": (
        "ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True, "
        f"{CHUNKS}, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05"
    ),
    "LigerFusedLinearDPOLoss.forward": f"lin_weight, _input, target, bias=None, {REFERENCE}",
    "LigerFusedLinearORPOFunction": (
        f"{PAIRS}, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, compiled=True, chunk_size=1"
    ),
    "LigerFusedLinearORPOLoss": "ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1",
    "LigerFusedLinearORPOLoss.forward": "lin_weight, _input, target, bias=None, nll_target=None",
    "LigerFusedLinearCPOFunction": f"{PAIRS}, {SMOOTHED}, compute_nll_loss=True, compiled=True, {CHUNKS}",
    "LigerFusedLinearCPOLoss": f"{SMOOTHED}, compute_nll_loss=True, compiled=True, {CHUNKS}",
    "LigerFusedLinearCPOLoss.forward": "lin_weight, _input, target, bias=None",
    "LigerFusedLinearSimPOFunction": (
        f"{PAIRS}, {SMOOTHED}, compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1"
    ),
    "LigerFusedLinearSimPOLoss": f"{SMOOTHED}, compute_nll_loss=True, compiled=True, gamma=0.5, chunk_size=1",
    "LigerFusedLinearSimPOLoss.forward": "lin_weight, _input, target, bias=None",
    "LigerFusedLinearKTOFunction": (
        f"_input, weight, target, preference_labels, bias=None, {REFERENCE}, kl=None, ignore_index=-100, beta=0.1, "
        f"compiled=True, use_ref_model=True, {CHUNKS}"
    ),
    "LigerFusedLinearKTOLoss": f"ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, {CHUNKS}",
    "LigerFusedLinearKTOLoss.forward": (
        f"_input, lin_weight, target, bias=None, preference_labels=None, {REFERENCE}, kl=None"
    ),
}
CHUNKED_POLICY = {
    "LigerFusedLinearGRPOFunction": (
        f"_input, weight, selected_token_ids, {SAMPLES}, {REFERENCE}, beta=0.04, epsilon_low=0.2, "
        f"epsilon_high=0.2, {POLICY}, {SAPO}, temperature=1.0, compiled=True, use_ref_model=True, chunk_size=1, "
        f"vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, {VESPO}, num_items_in_batch=None"
    ),
    "LigerFusedLinearGRPOLoss": (
        f"beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, {POLICY}, "
        f"{SAPO}, temperature=1.0, delta=None, use_bias_correction_kl=False, {VESPO}"
    ),
    "LigerFusedLinearGRPOLoss.forward": (
        f"_input, lin_weight, selected_token_ids, {SAMPLES}, {REFERENCE}, vllm_is_ratio=None, num_items_in_batch=None"
    ),
    "GrpoLossFunction": (
        "logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, "
        "eps_high, inplace, loss_type='grpo', max_completion_length=None, reduce=True, "
        f"importance_sampling_level='token', {SAPO}, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, "
        "num_items_in_batch=None, phi_seq=None"
    ),
    "triton_grpo_loss": (
        "logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, temperature=0.9, beta=0.04, "
        f"eps_low=0.2, eps_high=0.4, inplace=True, {POLICY}, reduce=False, {SAPO}, "
        f"vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, {VESPO}"
    ),
}
CHUNKED_DISTILLATION = {
    f"LigerFusedLinear{kind}{form}": row
    for kind in ("JSD", "CosineSimilarity")
    for form, row in (
        ("Function", f"{STUDENT_AND_TEACHER}, true_labels, student_bias, teacher_bias, {DISTILLATION}"),
        ("Loss", DISTILLATION),
        ("Loss.forward", f"{STUDENT_AND_TEACHER}, true_labels, student_bias=None, teacher_bias=None"),
    )
}
ACTIVATIONS = {
    "LigerSoftmaxFunction": "input_",
    "LigerSparsemaxFunction": "x, dim",
    "LigerDyTFunction": "x, alpha, gamma, beta",
    "LigerPolyNormFunction": "X, W, B, eps=1e-6, in_place=True",
    "liger_softmax": "x",
    "liger_sparsemax": "input, dim=-1",
    "liger_dyt": "x, alpha, gamma, beta",
    "liger_poly_norm": "X, W, B, eps=1e-6, in_place=True",
    "LigerSoftmax": "",
    "LigerSoftmax.forward": "x",
    "LigerSparsemax": "dim=-1",
    "LigerSparsemax.forward": "x",
}
NORMS = {
    "LigerGroupNormFunction": "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps",
    "liger_group_norm": "X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps",
    "LigerModulatedRMSNormFunction": f"X, W, scale, shift, eps, {NORM}, in_place=True",
    "liger_modulated_rms_norm": f"X, W, scale, shift=None, eps=1e-6, {NORM}, in_place=True",
}
ATTENTION = {
    "LigerMultiTokenAttentionFunction": f"scores, weight, bias=None, {CONVOLUTION}, sparse=False",
    "liger_multi_token_attention": f"scores, weight, bias=None, {CONVOLUTION}, sparse=False",
    "LigerFusedNeighborhoodAttentionFunction": f"query, key, value, {NEIGHBOURS}",
    "liger_fused_neighborhood_attention": f"query, key, value, {NEIGHBOURS}",
    "LigerAttnResFunction": "V_stacked, w_query, w_norm, eps",
    "liger_attn_res": "V, w_query, w_norm, eps=1e-6",
}
HYPER_CONNECTIONS = {
    "LigerMHCCoeffsFunction": f"x, {MHC}, allow_fp32, {SINKHORN}",
    "liger_mhc_coeffs": f"x, {MHC}, *, {MHC_OPTIONS}",
    "LigerMHCPreFunction": "x, h_pre",
    "liger_mhc_pre": "x, h_pre",
    "LigerMHCPostResFunction": "x, f_out, h_post, h_res",
    "liger_mhc_post_res": "x, f_out, h_post, h_res",
    "liger_mhc_apply": "x, f_out, h_pre, h_post, h_res, *, return_x_in=False",
    "liger_mhc_forward": f"x, layer, {MHC}, *, {MHC_OPTIONS}, return_coeffs=False",
}
# The `forward` of classes from which other code derives losses.
OF_BASE = "compiled=True, use_ref_model=False"
BASES = {
    "LigerFusedLinearPPOBase": (
        f"cls, ctx, _input, weight, selected_token_ids, {SAMPLES}, {REFERENCE}, epsilon_low=0.2, epsilon_high=0.2, "
        f"beta=0.04, {POLICY}, temperature=1.0, {OF_BASE}, chunk_size=1, {SAPO}, vllm_is_ratio=None, delta=None, "
        f"use_bias_correction_kl=False, {VESPO}, num_items_in_batch=None"
    ),
    "LigerFusedLinearPreferenceBase": (
        f"cls, ctx, {PAIRS}, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1, compute_nll_loss=True, "
        f"nll_target=None, {OF_BASE}, {REFERENCE}, average_log_prob=True, **loss_kwargs"
    ),
    "LigerFusedLinearUnpairedPreferenceBase": (
        "cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, "
        f"{OF_BASE}, {REFERENCE}, average_log_prob=False, **loss_kwargs"
    ),
    "LigerFusedLinearDistillationBase": (
        f"cls, ctx, {STUDENT_AND_TEACHER}, target, student_bias=None, teacher_bias=None, chunk_size=1024, "
        "ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, compute_ce_loss=True, "
        "temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs"
    ),
}
