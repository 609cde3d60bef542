"""A traced score_mod or mask_mod as a graph of a few operators, and its evaluation on torch tensors."""
