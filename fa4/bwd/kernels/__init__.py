"""Small kernels before and after the main kernel of a backward, each with its launch; every chip uses them."""
