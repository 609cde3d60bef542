"""Forward of consumer Blackwell. Start with `kernel`."""
