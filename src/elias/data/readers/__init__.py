"""One module per corpus format."""
