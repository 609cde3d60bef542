"""Programmable attention: a caller's score_mod and mask_mod as graphs of a few operators, and block masks.

`trace` turns a function into a `graph.Graph`, which backends evaluate: in torch here, in device code in `fa4.core`.
"""
