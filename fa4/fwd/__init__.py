"""Parts of the forward that all chips share."""
