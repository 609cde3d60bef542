"""Lightning indexer: scores of keys that choose what sparse attention reads, exact top-k, and its training loss."""
