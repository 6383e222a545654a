"""Operators of ATen that have a kernel on a CPU or on CUDA and not on the other, by torch's own list of kernels
(`native_functions.yaml`), from which a test takes them again."""

from .versions import PRESENT

_ON_CPU = """
    _add_relu _add_relu_ _convert_weight_to_int4pack_for_cpu _dyn_quant_matmul_4bit _dyn_quant_pack_4bit_weight
    _empty_affine_quantized _empty_per_channel_affine_quantized _histogramdd_bin_edges _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _spdiags _upsample_lanczos2d_aa
    _upsample_lanczos2d_aa_backward _weight_int4pack_mm_for_cpu from_file histogram mkldnn_rnn_layer
    mkldnn_rnn_layer_backward quantize_per_tensor.tensors slow_conv3d_forward to_mkldnn
    """

_ON_CUDA = """
    _conv_depthwise2d _convert_weight_to_int4pack _cslt_compress _cslt_sparse_mm _cslt_sparse_mm_search
    _cudnn_attention_backward _cudnn_attention_forward _cudnn_ctc_loss _cudnn_init_dropout_state _cudnn_rnn
    _cudnn_rnn_backward _cudnn_rnn_flatten_weight _efficient_attention_backward _efficient_attention_forward
    _fill_mem_eff_dropout_mask_ _flash_attention_backward _flash_attention_forward
    _flash_attention_forward_no_dropout_inplace _fused_rms_norm_backward _masked_scale _mixed_dtypes_linear
    _philox_key_fold_in _philox_key_split _philox_normal_ _philox_uniform_ _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_grouped_mm _scaled_grouped_mm_v2
    _sparse_semi_structured_addmm _sparse_semi_structured_apply _sparse_semi_structured_apply_dense
    _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_tile _thnn_fused_gru_cell
    _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    _to_sparse_semi_structured _triton_multi_head_attention _triton_scaled_dot_attention _use_cudnn_ctc_loss
    _use_miopen_ctc_loss _weight_int4pack_mm addmm.dtype baddbmm.dtype batch_norm_backward_elemt
    batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts
    batch_norm_stats bmm.dtype conv_depthwise3d record_stream
    cudnn_affine_grid_generator cudnn_affine_grid_generator_backward
    cudnn_batch_norm cudnn_batch_norm_backward cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu
    cudnn_convolution_transpose cudnn_grid_sampler cudnn_grid_sampler_backward miopen_batch_norm
    miopen_batch_norm_backward miopen_convolution miopen_convolution_add_relu miopen_convolution_relu
    miopen_convolution_transpose miopen_ctc_loss miopen_depthwise_convolution miopen_rnn miopen_rnn_backward mm.dtype
    """
_ON_CPU_SINCE_2_12 = "_scaled_mm_v2"

ON_CPU_ALONE = frozenset(_ON_CPU.split())
ON_CUDA_ALONE = frozenset((*_ON_CUDA.split(), *(_ON_CPU_SINCE_2_12.split() if PRESENT == "2.11" else ())))


def devices_of(op: str) -> frozenset[str]:
    """The devices, of "cpu" and "cuda", on which an operator ("aten.mm.default") has a kernel, as far as torch has it
    on one of them at least."""
    namespace, name, overload = op.split(".")
    names = {name, f"{name}.{overload}"}
    if namespace != "aten":
        return frozenset({"cpu", "cuda"})
    alone = {"cpu": ON_CPU_ALONE, "cuda": ON_CUDA_ALONE}
    return frozenset(kind for kind in alone if not any(names & ops for other, ops in alone.items() if other != kind))
