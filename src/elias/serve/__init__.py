"""The HTTP service: a model behind a few routes, and a page to look at it with."""
