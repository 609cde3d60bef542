"""fa4 where attention already happens: torch's scaled_dot_product_attention, transformers, DTensor. Each is imported
when it is asked for, and registers nothing before."""
