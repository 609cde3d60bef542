"""The command `python -m fa4`, its options and its demo."""
