"""Save, load, export and share models."""
