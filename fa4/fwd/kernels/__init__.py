"""Small kernels around the forward, each complete with its configuration and launcher; every chip uses them."""
