"""Forward of attention to lists of latents by up to 64 heads."""
