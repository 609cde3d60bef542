"""Device-side ideas that every chip and both directions share."""
