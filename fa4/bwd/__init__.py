"""Parts of the backward that all chips share."""
