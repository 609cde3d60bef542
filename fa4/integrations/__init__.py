"""fa4 in other libraries: torch's scaled_dot_product_attention, DTensor, transformers, Megatron, vLLM.

A library is imported, and something registered with it, only on request. The exception is fa4's entry point for vLLM's
plug-ins.
"""
