"""What the forward of every chip shares."""
