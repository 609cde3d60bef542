"""Kernels of public packages as they are installed: which are run, how their values are judged, and what is found."""
