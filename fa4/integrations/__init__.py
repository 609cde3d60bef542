"""fa4 where attention already happens: torch's scaled_dot_product_attention, DTensor, transformers, Megatron, vLLM.

Other libraries are imported when their part is asked for, and nothing is registered before, but for a name among vLLM's
plug-ins.
"""
