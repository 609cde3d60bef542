"""fa4 where attention already happens: torch's scaled_dot_product_attention, and transformers. Other libraries are
imported when their part is asked for, and nothing is registered before."""
