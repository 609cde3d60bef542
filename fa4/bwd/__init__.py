"""What the backward of every chip shares."""
