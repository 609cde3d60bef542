"""What the forward of every chip shares on the host."""
