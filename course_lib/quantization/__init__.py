"""Fewer bits for a weight: formats, rounding, quantised layers and what they cost.

Functions
---------
quantize
    A tensor as int8, int4, int3, int2, NF4 or FP4: a `QuantizedTensor`.
quantize_model, save_quantized, load_quantized
    A model's linear layers, in place, and as a file.
vectorwise_int8, int8_linear
    LLM.int8(): integer products with outlier columns apart.
Hessian, quantize_compensated
    GPTQ's rounding, which makes up for its errors on calibration inputs.
tensor_error, kl_divergence, top1_agreement, perplexity
    What was lost.
nf4_levels, fp4_levels, dynamic_levels
    The tables, derived.
"""

from course_lib.quantization.functional import quantize
from course_lib.quantization.gptq import Hessian, quantize_compensated
from course_lib.quantization.levels import dynamic_levels, fp4_levels, nf4_levels
from course_lib.quantization.linear import QuantizedEmbedding, QuantizedLinear
from course_lib.quantization.llm_int8 import int8_linear, vectorwise_int8
from course_lib.quantization.metrics import TensorError, kl_divergence, perplexity, tensor_error, top1_agreement
from course_lib.quantization.model import LayerReport, QuantizationReport, model_bytes, quantize_model
from course_lib.quantization.storage import load_quantized, save_quantized
from course_lib.quantization.tensor import SCHEMES, QuantizedTensor

__all__ = [
    "SCHEMES",
    "Hessian",
    "LayerReport",
    "QuantizationReport",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "QuantizedTensor",
    "TensorError",
    "dynamic_levels",
    "fp4_levels",
    "int8_linear",
    "kl_divergence",
    "load_quantized",
    "model_bytes",
    "nf4_levels",
    "perplexity",
    "quantize",
    "quantize_compensated",
    "quantize_model",
    "save_quantized",
    "tensor_error",
    "top1_agreement",
    "vectorwise_int8",
]
