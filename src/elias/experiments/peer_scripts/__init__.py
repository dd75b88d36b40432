"""Scripts that another interpreter runs, one that has a peer's package; not to be imported."""
