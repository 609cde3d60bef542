"""The public functions; `fa4/__init__.py` lists the names that users import."""
