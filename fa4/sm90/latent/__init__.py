"""Hopper forward of latent attention (MLA): V is the first columns of K."""
